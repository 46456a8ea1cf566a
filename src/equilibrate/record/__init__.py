"""Records of training runs, and the numbers of a monitor or scheduler for loggers."""
