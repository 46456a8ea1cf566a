"""Errors of runs."""

from equilibrate.runlog.records import RecordError


class RunError(RecordError):
    """A run that cannot continue. The message says which results are safe and what to do."""


class Diverged(RunError):
    """A run whose loss is no longer finite."""
