"""Does lowering the learning rate at equilibrium pay in the training people do?

`benchmarks/training.py` is the command. From data to tables: `data` → `tasks` → `controls`, `arms`
→ `runs` → `study` (which runs there are) → `workers` (processes) → `records` → `statistics` →
`tables`, `figures`.
"""
