"""How long each run took and on which device, in `timings.jsonl`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from equilibrate.runlog import files


@dataclass(frozen=True)
class Timing:
    """The wall time of a finished run.

    It includes measurements and the writing of rows. It does not include the start of the process
    and epochs that were repeated after a kill.
    """

    run: str
    """Name of the run."""
    replicas: int
    """Number of replicas."""
    epochs: int
    """Number of epochs."""
    steps_per_epoch: int
    """Number of steps in an epoch."""
    seconds: float
    """Wall time of all epochs."""
    device: str
    """Name of the GPU, or "CPU"."""
    torch: str
    """Version of PyTorch."""
    precision: str
    """Precision of the products."""
    commit: str | None = None
    """Commit of the code that finished the run."""

    @property
    def steps_per_second(self) -> float:
        """Steps per second, where a step is a step of all replicas.

        >>> Timing("r", 4, 10, 500, 2.0, "GPU", "2.11", "tf32").steps_per_second
        2500.0
        """
        return self.epochs * self.steps_per_epoch / self.seconds

    @property
    def replica_step_microseconds(self) -> float:
        """Microseconds per step of one replica.

        >>> Timing("r", 4, 10, 500, 2.0, "GPU", "2.11", "tf32").replica_step_microseconds
        100.0
        """
        return 1e6 / (self.steps_per_second * self.replicas)


def save(folder: Path | str, timing: Timing) -> None:
    """Save a timing to folder/timings.jsonl. It replaces an earlier timing of the same run.

    The file is written under another name and then renamed, so that it is always complete. Several
    processes may save timings at the same time.

    Args:
        folder: The folder of the reproduction.
        timing: The timing to save.
    """
    path = _path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(".timings.lock")):
        timings = load(folder) | {timing.run: timing}
        lines = [json.dumps(asdict(timing), ensure_ascii=False) for timing in timings.values()]
        files.write(path, "\n".join(lines) + "\n")


def load(folder: Path | str) -> dict[str, Timing]:
    """Return the timings in folder/timings.jsonl by run, empty without the file.

    >>> load("/no/such/folder")
    {}

    Args:
        folder: The folder of the reproduction.
    """
    path = _path(folder)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    timings = [Timing(**json.loads(line)) for line in lines]
    return {timing.run: timing for timing in timings}


def _path(folder: Path | str) -> Path:
    return Path(folder) / "timings.jsonl"
