"""Sums over lists of tensors, in plain torch and in Triton side by side."""
