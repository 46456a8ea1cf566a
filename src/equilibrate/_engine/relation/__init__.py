"""From the steps of an optimizer to both sides of FDR1."""
