"""Records of the checks beyond the study, which `training_checks.py` makes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_study.tasks import TASKS

LOSSES = {"recipe": "of every batch", "arm": "one mean at each check"}
"""What is handed to the rule, by the kind of a check."""


@dataclass(frozen=True)
class Run:
    """One run of a check."""

    seed: int
    metric: float
    begin: float | None
    """When the cooldown began, in budgets; None if it never did."""


@dataclass(frozen=True)
class Check:
    """Runs that differ in their seed alone."""

    task: str
    kind: str
    lr: float
    where: Mapping[str, Any]
    """What the first run was made with."""
    runs: tuple[Run, ...]


def path_of(folder: Path, task: str, kind: str, lr: float, device: str) -> Path:
    """Return the file with the runs of a check, one a line."""
    return folder / f"{task}-{kind}-{lr:g}-{device}.jsonl"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the runs recorded in a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read(folder: Path) -> list[Check]:
    """Return all checks in a folder, in the order of the tasks."""
    found = [_check(lines_of(path)) for path in sorted(folder.glob("*.jsonl"))]
    order = list(TASKS)
    return sorted(found, key=lambda check: order.index(check.task))


def _check(lines: list[dict[str, Any]]) -> Check:
    runs = [
        Run(
            line["seed"],
            line["metric"],
            line["acted"][0][0] / line["budget"] if line["acted"] else None,
        )
        for line in lines
    ]
    first = lines[0]
    return Check(first["task"], first["kind"], first["lr"], first["where"], tuple(runs))
