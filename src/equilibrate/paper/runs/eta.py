"""How long the runs still take, from the speed seen so far."""

from __future__ import annotations

from collections.abc import Sequence

from equilibrate.paper.protocol.run import Run


class Forecast:
    """Seconds left of a list of runs.

    The run at hand is timed by its own epochs; one to come by the last epochs of a run of the same
    task, in proportion to its replicas. Where no run of a task has been seen, nothing is said.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = {run.name: run for run in runs}
        self._epoch = dict.fromkeys(self._runs, 0)
        self._begun: dict[str, tuple[int, float]] = {}
        self._seconds: dict[str, float] = {}  # an epoch of one replica, by task

    def note(self, name: str, epoch: int, now: float) -> None:
        """Say that run `name` has done `epoch` epochs at the time `now`."""
        run = self._runs[name]
        first, since = self._begun.setdefault(name, (epoch, now))
        self._epoch[name] = epoch
        if epoch > first:
            each = (now - since) / (epoch - first)
            self._seconds[run.task.name] = each / len(run.replicas)

    def left(self, name: str | None = None) -> float | None:
        """Seconds left of one run, or of all; None where that is not known yet."""
        total = 0.0
        for run in self._runs.values() if name is None else [self._runs[name]]:
            epochs = run.epochs - self._epoch[run.name]
            if epochs == 0:
                continue
            if run.task.name not in self._seconds:
                return None
            total += epochs * len(run.replicas) * self._seconds[run.task.name]
        return total


def spoken(seconds: float | None) -> str:
    """A remaining time as one would say it.

    >>> [spoken(s) for s in (None, 0.0, 42.0, 200.0, 8000.0)]
    ['', 'done', '42 s left', '3 min left', '2.2 h left']
    """
    if seconds is None:
        return ""
    if seconds == 0:
        return "done"
    if seconds < 100:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"
