"""What the records of a study say: runs, metrics and differences, from its folder alone."""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from training_study.design import ARMS, TASKS, TRIALS
from training_study.records import RunRecord, read, read_checks
from training_study.statistics import Difference, mean, paired

REFERENCE = "cosine"
BUDGETS = {0.5: "cosine-half", 1.0: "cosine", 2.0: "cosine-double"}
"""The cosine that is made for each budget."""


class Results:
    """What the records of a folder say.

    Args:
        out: The folder.
    """

    def __init__(self, out: Path) -> None:
        self.records = read(out)
        chosen = _chosen(self.records)
        self.final = [
            record
            for record in self.records
            if record.stage == "final"
            and record.setting == chosen.get((record.task, _tuned(record.arm)), record.setting)
        ]
        self.checks = read_checks(out / "checks")
        self.tied = read(out / "tied")
        """Runs with a setting that was as good in the trials as the reported one."""
        path = out / "overhead.json"
        self.overhead: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    @cached_property
    def tasks(self) -> list[str]:
        """Tasks with at least two reported runs of the reference."""
        return [task for task in TASKS if len(self.runs(task, REFERENCE)) > 1]

    def arms(self, task: str) -> list[str]:
        """Return the arms of a task with at least two reported runs."""
        return [arm for arm in ARMS if len(self.runs(task, arm)) > 1]

    def runs(self, task: str, arm: str) -> list[RunRecord]:
        """Return the reported runs of an arm, by seed."""
        return [record for record in self.final if (record.task, record.arm) == (task, arm)]

    def trials(self, task: str, arm: str) -> list[RunRecord]:
        """Return the trials of an arm."""
        return [
            record
            for record in self.records
            if (record.stage, record.task, record.arm) == ("tuning", task, arm)
        ]

    def at(self, task: str, arm: str, budgets: float) -> dict[int, float]:
        """Return the metric after a number of budgets, by seed."""
        return _by_seed(self.runs(task, arm), budgets)

    def at_tied(self, task: str, arm: str, budgets: float) -> dict[int, float]:
        """Return the same as `at`, with the setting that was as good in the trials."""
        runs = [run for run in self.tied if (run.task, run.arm) == (task, arm)]
        return _by_seed(runs, budgets)

    def difference(
        self, task: str, arm: str, budgets: float, reference: str = REFERENCE
    ) -> Difference | None:
        """Return by how much an arm is better than the reference, at equal seeds."""
        theirs = self.at(task, reference, budgets)
        return paired(self.at(task, arm, budgets), theirs, lower_is_better=TASKS[task].is_text)

    def best(self, task: str) -> float:
        """Return the best arm's mean metric after one budget."""
        means = [
            mean(list(values.values())).value
            for arm in self.arms(task)
            if (values := self.at(task, arm, 1.0))
        ]
        return min(means) if TASKS[task].is_text else max(means)


def _tuned(arm: str) -> str:
    """Return the arm whose setting an arm has."""
    return ARMS[arm].as_tuned or arm


def _by_seed(runs: Iterable[RunRecord], budgets: float) -> dict[int, float]:
    found = {run.seed: run.at(budgets) for run in runs}
    return {seed: value for seed, value in found.items() if value is not None}


def _chosen(records: Iterable[RunRecord]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the setting with the best metric of each task and arm that was tried in full."""
    found: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        if record.stage == "tuning":
            found.setdefault((record.task, record.arm), []).append(record)
    return {
        key: max(
            trials, key=lambda r: -r.metrics[-1] if TASKS[r.task].is_text else r.metrics[-1]
        ).setting
        for key, trials in found.items()
        if len(trials) == TRIALS
    }
