"""Trainers and loggers. Each module imports its framework, and nothing else imports the modules."""
