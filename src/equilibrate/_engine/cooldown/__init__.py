"""From samples and losses to what a cooldown would gain."""
