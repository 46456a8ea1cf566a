"""Records of runs: one JSON file each while a study runs, one line each in a file a task later."""

import json
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from training_study.tasks import TASKS


@dataclass(frozen=True)
class Record:
    """What a run has recorded."""

    stage: str
    task: str
    arm: str
    seed: int
    trial: int
    setting: dict[str, Any]
    budget: int
    steps: tuple[int, ...]
    """Steps at which the model was evaluated."""
    metrics: tuple[float, ...]
    losses: tuple[float, ...]
    """Losses of the examples on which it was evaluated."""
    training_losses: tuple[float, ...]
    rates: tuple[float, ...]
    """Learning rate of the last step before each evaluation."""
    acted: tuple[tuple[int, str], ...]
    """Steps after which a rule acted, and why."""
    diverged: bool
    shared: int
    """Steps that were made together with other runs."""
    seconds: float
    """Time of its own steps, or of all if they were shared to the end."""
    where: dict[str, Any]
    raw: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the run, as that of its job."""
        trial = f"-{self.trial}" if self.stage == "tuning" else ""
        return f"{self.stage}_{self.task}_{self.arm}_{self.seed}{trial}"

    @property
    def lower_is_better(self) -> bool:
        """Whether the metric is a loss."""
        return TASKS[self.task].is_text

    def at(self, budgets: float) -> float | None:
        """Return the metric after a number of budgets; None if it was not evaluated there.

        A run that ended before has a learning rate of zero and does not change any more.
        """
        step = min(round(budgets * self.budget), self.steps[-1])
        return self.metrics[self.steps.index(step)] if step in self.steps else None


def parse(raw: dict[str, Any]) -> Record:
    """Return a record from JSON."""
    steps, metrics, losses, training, rates = zip(*raw["curve"], strict=True)
    kept = ("stage", "task", "arm", "seed", "trial", "setting", "budget", "diverged")
    more = ("shared", "seconds", "where")
    return Record(
        **{key: raw[key] for key in kept + more},
        steps=steps,
        metrics=metrics,
        losses=losses,
        training_losses=training,
        rates=rates,
        acted=tuple((step, reason) for step, reason in raw["acted"]),
        raw=raw,
    )


def read(out: Path) -> list[Record]:
    """Return all records of a folder, each run once, in the order of their names."""
    found = {record.name: record for record in map(parse, _raw(out))}
    return [found[name] for name in sorted(found)]


def collect(out: Path) -> None:
    """Merge the files of all runs into one file for each task, one line a run; drop forks."""
    records = read(out)
    for task in {record.task for record in records}:
        lines = [
            json.dumps(record.raw, separators=(",", ":"), ensure_ascii=False)
            for record in records
            if record.task == task
        ]
        partial = out / f"{task}.partial"
        partial.write_text("\n".join(lines) + "\n")
        partial.replace(out / f"{task}.jsonl")
    for path in _files(out):
        path.unlink()
    shutil.rmtree(out / "forks", ignore_errors=True)


def pack(out: Path, archive: Path) -> None:
    """Write a folder of records into a tar file, in one piece."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        for path in sorted(out.glob("*.json*")):
            tar.add(path, path.name)
    partial.replace(archive)


def _files(out: Path) -> list[Path]:
    return sorted([*out.glob("tuning_*.json"), *out.glob("final_*.json")])


def _raw(out: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(out.glob("*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())
    for path in _files(out):
        yield _run(path, path.stat().st_mtime_ns)


@cache
def _run(path: Path, _written: int) -> dict[str, Any]:
    """Return the record of a run. It is read once: a study looks at all of them after each run."""
    return json.loads(path.read_text())
