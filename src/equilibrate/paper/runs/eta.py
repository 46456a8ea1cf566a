"""The remaining time of several runs, estimated from the speed so far."""

from __future__ import annotations

from collections.abc import Sequence

from equilibrate.paper.protocol.run import Run


class RemainingTime:
    """Estimates the remaining time of a list of runs.

    The current run is timed by its own epochs. A run that has not started is estimated from the
    latest run of the same task, in proportion to the number of replicas.

    Args:
        runs: The runs in the order in which they are executed.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = {run.name: run for run in runs}
        self._epoch = dict.fromkeys(self._runs, 0)
        self._first: dict[str, tuple[int, float]] = {}  # (epoch, time) of the first update
        self._seconds: dict[str, float] = {}  # for one epoch of one replica, by task

    def update(self, name: str, epoch: int, now: float) -> None:
        """Record the progress of a run.

        Args:
            name: The name of the run.
            epoch: Number of its completed epochs.
            now: The current time in seconds.
        """
        run = self._runs[name]
        first, since = self._first.setdefault(name, (epoch, now))
        self._epoch[name] = epoch
        if epoch > first:
            per_epoch = (now - since) / (epoch - first)
            self._seconds[run.task.name] = per_epoch / len(run.replicas)

    def seconds(self, name: str | None = None) -> float | None:
        """Return the remaining seconds, or None if no run of the same task was timed yet.

        Args:
            name: A run; by default all runs together.
        """
        total = 0.0
        for run in self._runs.values() if name is None else [self._runs[name]]:
            epochs = run.epochs - self._epoch[run.name]
            if epochs == 0:
                continue
            if run.task.name not in self._seconds:
                return None
            total += epochs * len(run.replicas) * self._seconds[run.task.name]
        return total


def format_eta(seconds: float | None) -> str:
    """Return a remaining time as text, empty if it is unknown.

    >>> [format_eta(s) for s in (None, 0.0, 42.0, 200.0, 8000.0)]
    ['', 'done', '42 s left', '3 min left', '2.2 h left']

    Args:
        seconds: The remaining time in seconds, or None.
    """
    if seconds is None:
        return ""
    if seconds == 0:
        return "done"
    if seconds < 100:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"
