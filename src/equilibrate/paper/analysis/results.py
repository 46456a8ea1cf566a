"""What the records of a reproduction hold, as arrays: all that figures and claims are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibrate.paper.protocol.profiles import PROFILES
from equilibrate.paper.protocol.run import Run, Stairs
from equilibrate.runlog import records

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Result:
    """The rows of one run: `epoch` has one entry for each row, a column one row for each."""

    run: Run
    profile: str
    device: str
    environment: Mapping[str, Any]
    epoch: Array
    rows: tuple[Mapping[str, Any], ...]

    def column(self, name: str, arm: str | None = None) -> Array:
        """Values of shape (rows, replicas), of one arm or all; nan where a row has none."""
        missing = [None] * len(self.run.replicas)
        values = np.array([row.get(name, missing) for row in self.rows], dtype=np.float64)
        values = values.reshape(len(self.rows), len(self.run.replicas))
        if arm is None:
            return values
        return values[:, [name == arm for name, _ in self.run.replicas]]

    def measured(self, name: str, arm: str) -> tuple[Array, Array]:
        """(epochs, values) of the rows that have the column."""
        values = self.column(name, arm)
        there = ~np.isnan(values).all(1)
        return self.epoch[there], values[there]

    def treads(self) -> list[Tread]:
        """What was recorded on each tread of each staircase."""
        found = []
        for arm, schedule in self.run.arms.items():
            start = 0
            for lr, epochs in schedule.treads if isinstance(schedule, Stairs) else ():
                here = (self.epoch > start) & (self.epoch <= start + epochs)
                if here.any():
                    found.append(Tread(self, arm, lr, start, epochs, np.flatnonzero(here)))
                start += epochs
        return found

    @property
    def epochs_done(self) -> int:
        """Whole epochs that have been recorded."""
        return int(self.epoch[-1]) if len(self.epoch) else 0

    @property
    def finished(self) -> bool:
        """Whether the last epoch that this run asks for has been recorded."""
        return self.epochs_done >= self.run.epochs

    @property
    def has_all_epochs(self) -> bool:
        """Whether all epochs of its profile have been recorded."""
        return self.epochs_done >= self.run.full_epochs

    @property
    def whole(self) -> bool:
        """Whether it is finished and has all epochs and seeds of its profile."""
        return self.finished and self.shortfall is None

    @property
    def shortfall(self) -> str | None:
        """Which part of the profile's epochs and seeds is there; None where it is all of them."""
        parts = []
        if not self.has_all_epochs:
            parts.append(f"{self.epochs_done} of {self.run.full_epochs} epochs")
        if len(self.run.seeds) < self.run.full_seeds:
            parts.append(f"{len(self.run.seeds)} of {self.run.full_seeds} seeds")
        return ", ".join(parts) or None


@dataclass(frozen=True, eq=False)
class Tread:
    """The part of an arm that was made at one learning rate."""

    result: Result
    arm: str
    lr: float
    start: int
    epochs: int
    rows: NDArray[np.intp]

    @property
    def time(self) -> Array:
        """Epochs since the learning rate was set."""
        return self.result.epoch[self.rows] - self.start

    @property
    def finished(self) -> bool:
        """Whether all its epochs have been recorded."""
        return float(self.time[-1]) >= self.epochs

    def column(self, name: str) -> Array:
        """Values of shape (rows, seeds)."""
        return self.result.column(name, self.arm)[self.rows]

    def last(self, name: str) -> Array:
        """The last value that was measured, for each seed."""
        values = self.column(name)
        there = ~np.isnan(values).all(1)
        return values[there][-1] if there.any() else np.full(values.shape[1], np.nan)


def record_files(folder: Path | str) -> list[Path]:
    """The records in `folder`; a kill at the very start may leave an empty one, which is none."""
    return [path for path in sorted(Path(folder).glob("*.jsonl")) if path.stat().st_size]


def load(folder: Path | str) -> dict[str, Result]:
    """Read all records in `folder`, by the names of their runs, in the order of the protocol.

    Parts of a run that have come equally far are joined; one that lags behind is left out, and so
    is one whose seeds another has with more of them, such as the run made whole after all.
    """
    parts: dict[str, list[Result]] = {}
    for path in record_files(folder):
        record = records.read(path)
        run = Run.from_config(record.config)
        result = Result(
            run=run,
            profile=record.config["profile"],
            device=record.config["device"],
            environment=record.environment,
            epoch=np.array([row["epoch"] for row in record.rows], dtype=np.float64),
            rows=tuple(record.rows),
        )
        parts.setdefault(run.whole_name, []).append(result)
    protocol = [name for name in PROFILES["paper"].runs if name in parts]
    return {name: _joined(name, parts[name]) for name in dict.fromkeys([*protocol, *parts])}


def _joined(name: str, parts: list[Result]) -> Result:
    """The parts that have come furthest, as one run with all their seeds."""
    furthest = max(parts, key=lambda part: len(part.epoch))
    level = [part for part in parts if np.array_equal(part.epoch, furthest.epoch)]
    seeds = [set(part.run.seeds) for part in level]
    level = [
        part for part, own in zip(level, seeds, strict=True) if not any(own < s for s in seeds)
    ]
    level.sort(key=lambda part: part.run.seeds)
    first = level[0]
    together = [seed for part in level for seed in part.run.seeds]
    runs = [replace(part.run, name=name, seeds=first.run.seeds) for part in level]
    if len(set(together)) < len(together) or any(run != runs[0] for run in runs):
        raise records.RecordError(
            f"the parts of {name} ({', '.join(part.run.name for part in level)}) must differ in "
            "their seeds and in nothing else: remove one"
        )
    whole = replace(runs[0], seeds=tuple(together))
    return replace(first, run=whole, rows=_side_by_side(whole, level))


def _side_by_side(whole: Run, parts: list[Result]) -> tuple[Mapping[str, Any], ...]:
    """Rows in which each list has one entry for each replica of the whole run."""
    if len(parts) == 1:
        return parts[0].rows
    order = [replica for part in parts for replica in part.run.replicas]
    places = [order.index(replica) for replica in whole.replicas]
    joined = []
    for rows in zip(*(part.rows for part in parts), strict=True):
        row = dict(rows[0])
        for name in [name for name, value in row.items() if isinstance(value, list)]:
            values = [value for part in rows for value in part[name]]
            row[name] = [values[place] for place in places]
        joined.append(row)
    return tuple(joined)
