"""Records, checkpoints, locks and provenance of training runs."""
