"""The records of a reproduction as arrays, from which figures, tables and claims are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibrate.record import jsonl
from equilibrate_paper.protocol.profiles import PROFILES
from equilibrate_paper.protocol.run import PaperRun
from equilibrate_paper.protocol.schedules import PiecewiseConstant

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Result:
    """The recorded rows of one run."""

    run: PaperRun
    """What was run."""
    profile: str
    """Name of the profile that the run is part of."""
    device: str
    """Device on which it ran."""
    environment: Mapping[str, Any]
    """Versions, hardware and commit."""
    epoch: Array
    """Epochs after which the rows were recorded."""
    rows: tuple[Mapping[str, Any], ...]
    """The rows; a list in a row has one entry for each replica."""

    def column(self, name: str, arm: str | None = None) -> Array:
        """Collect the values of one column.

        Args:
            name: The column.
            arm: An arm of the run; None for all.

        Returns:
            Values of shape (rows, replicas); nan where a row does not have the column.
        """
        missing = [None] * len(self.run.replicas)
        values = np.array([row.get(name, missing) for row in self.rows], dtype=np.float64)
        values = values.reshape(len(self.rows), len(self.run.replicas))
        if arm is None:
            return values
        return values[:, [name == arm for name, _ in self.run.replicas]]

    def measured(self, name: str, arm: str) -> tuple[Array, Array]:
        """Collect the values of one column from the rows that have it.

        Args:
            name: The column.
            arm: An arm of the run.

        Returns:
            Epochs of shape (rows,) and values of shape (rows, seeds).
        """
        values = self.column(name, arm)
        there = ~np.isnan(values).all(1)
        return self.epoch[there], values[there]

    def phases(self) -> list[Phase]:
        """List the phases of constant learning rate of which something was recorded.

        Returns:
            The phases of all arms with a piecewise constant schedule, in order.
        """
        found = []
        for arm, schedule in self.run.arms.items():
            start = 0
            for lr, epochs in schedule.phases if isinstance(schedule, PiecewiseConstant) else ():
                here = (self.epoch > start) & (self.epoch <= start + epochs)
                if here.any():
                    found.append(Phase(self, arm, lr, start, epochs, np.flatnonzero(here)))
                start += epochs
        return found

    @property
    def epochs_done(self) -> int:
        """Number of complete epochs that have been recorded."""
        return int(self.epoch[-1]) if len(self.epoch) else 0

    @property
    def finished(self) -> bool:
        """Whether the last epoch of this run has been recorded."""
        return self.epochs_done >= self.run.epochs

    @property
    def has_all_epochs(self) -> bool:
        """Whether all epochs of its profile have been recorded."""
        return self.epochs_done >= self.run.full_epochs

    @property
    def complete(self) -> bool:
        """Whether the run is finished and has all epochs and seeds of its profile."""
        return self.finished and self.shortfall is None

    @property
    def shortfall(self) -> str | None:
        """How many of the profile's epochs and seeds are recorded; None if all are."""
        parts = []
        if not self.has_all_epochs:
            parts.append(f"{self.epochs_done} of {self.run.full_epochs} epochs")
        if len(self.run.seeds) < self.run.full_seeds:
            parts.append(f"{len(self.run.seeds)} of {self.run.full_seeds} seeds")
        return ", ".join(parts) or None


@dataclass(frozen=True, eq=False)
class Phase:
    """The part of an arm with one learning rate."""

    result: Result
    """The run."""
    arm: str
    """The arm of the run."""
    lr: float
    """The learning rate."""
    start: int
    """Epoch after which the learning rate was set."""
    epochs: int
    """Length in epochs, recorded or not."""
    rows: NDArray[np.intp]
    """Indices of the rows that were recorded."""

    @property
    def time(self) -> Array:
        """Epochs since the learning rate was set."""
        return self.result.epoch[self.rows] - self.start

    @property
    def finished(self) -> bool:
        """Whether all epochs of the phase have been recorded."""
        return float(self.time[-1]) >= self.epochs

    def column(self, name: str) -> Array:
        """Collect the values of one column.

        Args:
            name: The column.

        Returns:
            Values of shape (rows, seeds).
        """
        return self.result.column(name, self.arm)[self.rows]

    def last(self, name: str) -> Array:
        """Find the last value of one column.

        Args:
            name: The column.

        Returns:
            A value for each seed; nan if the column was never recorded.
        """
        values = self.column(name)
        there = ~np.isnan(values).all(1)
        return values[there][-1] if there.any() else np.full(values.shape[1], np.nan)


def record_files(folder: Path | str) -> list[Path]:
    """List the record files in a folder.

    Files without content are left out: a process that is killed early may leave one.

    Args:
        folder: The folder.

    Returns:
        The paths, sorted.
    """
    return [path for path in sorted(Path(folder).glob("*.jsonl")) if path.stat().st_size]


def load(folder: Path | str) -> dict[str, Result]:
    """Read all records in a folder.

    Args:
        folder: The folder.

    Returns:
        Results by the names of their runs, in the order of the protocol.
    """
    found: dict[str, Result] = {}
    for path in record_files(folder):
        record = jsonl.read(path)
        run = PaperRun.from_config(record.config)
        found[run.name] = Result(
            run=run,
            profile=record.config["profile"],
            device=record.config["device"],
            environment=record.environment,
            epoch=np.array([row["epoch"] for row in record.rows], dtype=np.float64),
            rows=tuple(record.rows),
        )
    protocol = [name for name in PROFILES["paper"].runs if name in found]
    return {name: found[name] for name in dict.fromkeys([*protocol, *found])}
