"""How a monitor measures: update rules, sums over tensors, intervals and their window."""
