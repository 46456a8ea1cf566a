"""Figures, tables, pages and terminal output."""
