"""How long each run took, beside the records: what machine, how many steps, how many seconds."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Timing:
    """A finished run: the wall time of its epochs, measurements and rows included.

    Epochs that were made twice after a kill, and the start of a process, are not counted.
    """

    run: str
    replicas: int
    epochs: int
    steps_per_epoch: int
    seconds: float
    device: str
    torch: str
    precision: str
    commit: str | None = None
    """Of the code that finished it."""

    @property
    def steps_per_second(self) -> float:
        """Steps a second, each of all replicas.

        >>> Timing("r", 4, 10, 500, 2.0, "GPU", "2.11", "tf32").steps_per_second
        2500.0
        """
        return self.epochs * self.steps_per_epoch / self.seconds

    @property
    def replica_step_microseconds(self) -> float:
        """What one step of one replica costs.

        >>> Timing("r", 4, 10, 500, 2.0, "GPU", "2.11", "tf32").replica_step_microseconds
        100.0
        """
        return 1e6 / (self.steps_per_second * self.replicas)


def note(folder: Path | str, timing: Timing) -> None:
    """Put a line into folder/timings.jsonl, in the place of an earlier one of the same run.

    The file is written beside and then given its name, so that it is whole at any moment.
    """
    path = _path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    noted = load(folder) | {timing.run: timing}
    lines = [json.dumps(asdict(timing), ensure_ascii=False) for timing in noted.values()]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(partial, path)


def load(folder: Path | str) -> dict[str, Timing]:
    """The timing of each run, by name; empty where none was noted.

    >>> load("/no/such/folder")
    {}
    """
    path = _path(folder)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    timings = [Timing(**json.loads(line)) for line in lines]
    return {timing.run: timing for timing in timings}


def _path(folder: Path | str) -> Path:
    return Path(folder) / "timings.jsonl"
