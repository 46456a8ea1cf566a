"""A reproduction of the paper: its data, protocol, runs, analysis and figures."""
