"""The remaining time of several runs, estimated from the speed so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from equilibrate_paper.protocol.run import Run
from equilibrate_paper.runs.timings import Timing


class RemainingTime:
    """Estimates the remaining time of a list of runs.

    The current run is timed by its own epochs. Another run is estimated from the timed run of the
    same task that resembles it most, in proportion to the number of replicas: one with the same
    precision if there is one, then the one with the most similar number of replicas, then the
    latest.

    Args:
        runs: The runs in the order in which they are executed.
        done: Number of epochs that are recorded already, by the names of runs.
        finished: Finished runs and their timings, those of earlier calls.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        done: Mapping[str, int] | None = None,
        finished: Iterable[tuple[Run, Timing]] = (),
    ) -> None:
        self._runs = {run.name: run for run in runs}
        self._epoch = {name: (done or {}).get(name, 0) for name in self._runs}
        self._first: dict[str, tuple[int, float]] = {}  # (epoch, time) of the first update
        # Seconds for one epoch of one replica, in the order in which runs were timed.
        self._timed = {
            run.name: (run, timing.seconds / timing.epochs / timing.replicas)
            for run, timing in finished
        }

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
            self._timed.pop(name, None)  # the latest comes last
            self._timed[name] = run, per_epoch / len(run.replicas)

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
            rate = self._rate(run)
            if rate is None:
                return None
            total += epochs * len(run.replicas) * rate
        return total

    @property
    def epochs(self) -> int:
        """Number of epochs that remain."""
        return sum(run.epochs - self._epoch[run.name] for run in self._runs.values())

    def _rate(self, run: Run) -> float | None:
        """Return the seconds for one epoch of one replica, None if no similar run was timed."""
        if run.name in self._timed:
            return self._timed[run.name][1]
        similar = [
            (other.precision != run.precision, _distance(other, run), -index, rate)
            for index, (other, rate) in enumerate(self._timed.values())
            if other.task.name == run.task.name
        ]
        return min(similar)[-1] if similar else None


def _distance(first: Run, second: Run) -> float:
    """Return how much two runs differ in their numbers of replicas."""
    return abs(math.log(len(first.replicas) / len(second.replicas)))


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
