"""Records of runs: one line of JSON each, one file for each task."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_study.design import TASKS

LOSSES = {"recipe": "of every batch", "arm": "one mean at each check"}
"""What was handed to the rule, by the kind of a check."""


@dataclass(frozen=True)
class RunRecord:
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
    rates: tuple[float, ...]
    """Learning rate of the last step before each evaluation."""
    acted: tuple[tuple[int, str], ...]
    """Steps after which a rule acted, and why."""
    diverged: bool
    where: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the run."""
        trial = f"-{self.trial}" if self.stage == "tuning" else ""
        return f"{self.stage}_{self.task}_{self.arm}_{self.seed}{trial}"

    def at(self, budgets: float) -> float | None:
        """Return the metric after a number of budgets; None if it was not evaluated there.

        A run that ended before has a learning rate of zero and does not change any more.
        """
        step = min(round(budgets * self.budget), self.steps[-1])
        return self.metrics[self.steps.index(step)] if step in self.steps else None


def read(out: Path) -> list[RunRecord]:
    """Return all records of a folder, each run once, in the order of their names."""
    found = {r.name: r for path in sorted(out.glob("*.jsonl")) for r in map(_parse, _lines(path))}
    return [found[name] for name in sorted(found)]


@dataclass(frozen=True)
class CheckedRun:
    """One run of the recipe beyond the study."""

    seed: int
    metric: float
    begin: float | None
    """When the cooldown began, in budgets; None if it never did."""


@dataclass(frozen=True)
class Check:
    """Runs of the recipe that differ in their seed alone."""

    task: str
    kind: str
    lr: float
    where: Mapping[str, Any]
    """What the first run was made with."""
    runs: tuple[CheckedRun, ...]


def read_checks(folder: Path) -> list[Check]:
    """Return all checks in a folder, in the order of the tasks."""
    found = [_check(_lines(path)) for path in sorted(folder.glob("*.jsonl"))]
    order = list(TASKS)
    return sorted(found, key=lambda check: order.index(check.task))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _parse(raw: dict[str, Any]) -> RunRecord:
    steps, metrics, _, _, rates = zip(*raw["curve"], strict=True)
    kept = ("stage", "task", "arm", "seed", "trial", "setting", "budget", "diverged", "where")
    return RunRecord(
        **{key: raw[key] for key in kept},
        steps=steps,
        metrics=metrics,
        rates=rates,
        acted=tuple((step, reason) for step, reason in raw["acted"]),
    )


def _check(lines: list[dict[str, Any]]) -> Check:
    runs = [
        CheckedRun(
            line["seed"],
            line["metric"],
            line["acted"][0][0] / line["budget"] if line["acted"] else None,
        )
        for line in lines
    ]
    first = lines[0]
    return Check(first["task"], first["kind"], first["lr"], first["where"], tuple(runs))
