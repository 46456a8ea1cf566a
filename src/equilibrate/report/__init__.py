"""Figures, tables and HTML pages made from recorded rows and judged claims."""
