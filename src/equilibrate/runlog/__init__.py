"""Records, checkpoints and provenance of training runs."""
