"""Figures and HTML pages made from recorded rows."""
