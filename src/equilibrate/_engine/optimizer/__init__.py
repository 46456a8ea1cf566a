"""Torch's conventions: hooks, parameters, settings and buffers of an optimizer."""
