"""The training study, from its records to its tables and figures.

`design` → `records` → `statistics`, `results` → `words`, `tables`, `figures`;
`benchmarks/training.py` is the command.
"""
