"""The command `equilibrate-paper`."""
