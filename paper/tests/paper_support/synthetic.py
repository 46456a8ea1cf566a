"""Records of runs that never ran: columns given as functions, written as the real ones are."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from equilibrate.record import jsonl
from equilibrate_paper.protocol.run import PaperRun
from equilibrate_paper.protocol.schedules import PiecewiseConstant

Column = Callable[[float, float, str, int], float]
"""(epochs since the learning rate was set, learning rate, arm, seed) -> value."""


def write(
    run: PaperRun,
    folder: Path,
    columns: Mapping[str, Column],
    *,
    profile: str = "paper",
    upto: float = float("inf"),
    rows: int = 12,
) -> None:
    """Write a record with `rows` rows in each phase, up to an epoch."""
    config = run.to_config() | {"profile": profile, "device": "cpu", "steps_per_epoch": 600}
    path = folder / "records" / f"{run.name}.jsonl"
    with jsonl.Writer(path, config=config, mode="overwrite") as writer:
        for start, epochs in _phases(run):
            for k in range(1, rows + 1):
                epoch = start + epochs * k / rows
                if epoch <= upto:
                    row: dict[str, Any] = {"epoch": epoch, "step": round(600 * epoch)}
                    for name, column in columns.items():
                        row[name] = [
                            column(epoch - start, _lr(run, arm, start), arm, seed)
                            for arm, seed in run.replicas
                        ]
                    writer.write(row)


def _phases(run: PaperRun) -> list[tuple[int, int]]:
    constant = [s.phases for s in run.arms.values() if isinstance(s, PiecewiseConstant)]
    found, start = [], 0
    for _, epochs in constant[0] if constant else [(0, run.epochs)]:
        found.append((start, epochs))
        start += epochs
    return found


def _lr(run: PaperRun, arm: str, epoch: int) -> float:
    schedule = run.arms[arm]
    return schedule.lr_at(epoch) if isinstance(schedule, PiecewiseConstant) else schedule.lr
