"""Errors of runs."""

from equilibrate.record.jsonl import RecordError


class RunError(RecordError):
    """A run that cannot continue. The message says which results are safe and what to do."""


class Diverged(RunError):
    """A run whose loss is no longer finite."""


class Unfinished(RunError):
    """Runs that stopped at their time limit. They continue when they are executed again."""
