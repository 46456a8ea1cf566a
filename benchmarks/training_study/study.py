"""Which runs there are, in which order, and with which settings: chosen from trials.

- tuning: for each task and arm eight trials of settings, on other seeds than those reported. A
  trial trains for budget 1 and is judged by its metric on validation examples at the end.
- final: the chosen setting, each reported seed, for two budgets. Evaluated on test examples at 1/2,
  1 and 2 budgets, and at equal distances in between.

Runs are ordered by trial, then by seed, so that a study that is interrupted has all arms alike.
Those that begin with the same training make it together.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training_study.arms import ARMS, TRIALS
from training_study.controls import DEFAULT, Cadence
from training_study.records import Record, read
from training_study.runs import Job, Place, write
from training_study.tasks import TASKS

EVALUATIONS = 30
"""Evaluations in a budget of a reported run; a trial has a sixth."""


@dataclass(frozen=True)
class Study:
    """The settings of a study, which all its runs share."""

    budgets: dict[str, int] = field(
        default_factory=lambda: {name: task.budget for name, task in TASKS.items()}
    )
    """Steps of budget 1, by task."""
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    tuning_seeds: tuple[int, ...] = (1000,)
    cadence: Cadence = DEFAULT

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: If they cannot be used.
        """
        if set(self.seeds) & set(self.tuning_seeds):
            raise ValueError(
                f"seeds {self.seeds} and tuning_seeds {self.tuning_seeds} overlap: settings must "
                "be chosen on other seeds than those reported"
            )
        odd = {name: budget for name, budget in self.budgets.items() if budget % EVALUATIONS}
        if odd:
            raise ValueError(f"budgets must be multiples of {EVALUATIONS} steps, got {odd}")

    def tuning(self) -> list[Job]:
        """Return all trials."""
        return [
            Job(
                "tuning", task, arm, seed, ARMS[arm].trials(TASKS[task])[trial], budget,
                steps=budget, interval=6 * budget // EVALUATIONS, trial=trial,
                cadence=self.cadence,
            )
            for seed in self.tuning_seeds
            for trial in range(TRIALS)
            for task, budget in self._longest_first()
            for arm in self.arms
            if ARMS[arm].as_tuned is None
        ]  # fmt: skip

    def final(self, chosen: dict[tuple[str, str], dict[str, Any]]) -> list[Job]:
        """Return the reported runs of the tasks of which all settings have been chosen.

        Args:
            chosen: The settings, by task and arm.
        """
        tuned = [arm for arm in self.arms if ARMS[arm].as_tuned is None]
        tasks = {task for task in self.budgets if all((task, arm) in chosen for arm in tuned)}
        return [
            Job(
                "final", task, arm, seed, chosen[task, ARMS[arm].as_tuned or arm], budget,
                steps=round(ARMS[arm].length * budget), interval=budget // EVALUATIONS,
                cadence=self.cadence,
            )
            for seed in self.seeds
            for task, budget in self._longest_first()
            for arm in self.arms
            if task in tasks
        ]  # fmt: skip

    def chosen(self, records: Iterable[Record]) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the best setting of each task and arm of which all trials are finished."""
        found: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            if record.stage == "tuning" and record.seed in self.tuning_seeds:
                found.setdefault((record.task, record.arm), []).append(record)
        return {
            key: best_trial(trials)
            for key, trials in found.items()
            if len(trials) == TRIALS * len(self.tuning_seeds)
        }

    def remaining(self, place: Place) -> list[list[Job]]:
        """Return the runs that can be started now and have no record yet, in order.

        Runs that begin with the same training, which has not been made yet, are in one list.
        """
        forked = place.forked()  # before the records: a fork goes once there is a record
        records = read(place.out)
        # A reported run is made again if trials that were added later have chosen another setting.
        done = {(record.name, json.dumps(record.setting)) for record in records}
        found: list[list[Job]] = []
        together: dict[Any, list[Job]] = {}
        for job in self.tuning() + self.final(self.chosen(records)):
            if (job.name, json.dumps(job.setting)) in done:
                continue
            if job.shared is None or job.name in forked:
                found.append([job])
            elif job.shared in together:
                together[job.shared].append(job)
            else:
                together[job.shared] = [job]
                found.append(together[job.shared])
        return found

    def total(self) -> list[Job]:
        """Return all runs, with any setting for the reported ones."""
        anything = {
            (task, arm): ARMS[arm].trials(TASKS[task])[0]
            for task in self.budgets
            for arm in self.arms
            if ARMS[arm].as_tuned is None
        }
        return self.tuning() + self.final(anything)

    def _longest_first(self) -> Sequence[tuple[str, int]]:
        return sorted(self.budgets.items(), key=lambda kv: -kv[1] * TASKS[kv[0]].step_ms)


def best_trial(trials: Sequence[Record]) -> dict[str, Any]:
    """Return the setting with the best mean metric at the end, over tuning seeds."""
    by_setting: dict[str, list[float]] = {}
    for record in trials:
        by_setting.setdefault(json.dumps(record.setting), []).append(record.metrics[-1])
    sign = -1 if trials[0].lower_is_better else 1
    means = {key: sign * sum(values) / len(values) for key, values in by_setting.items()}
    return json.loads(max(means, key=means.__getitem__))


def save(study: Study, out: Path) -> None:
    """Write the settings of a study into its folder."""
    write(out / "study.json", asdict(study))


def open_study(out: Path) -> Study | None:
    """Return the study of a folder, if there is one."""
    path = out / "study.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    horizons = found["cadence"]["horizons"]
    cadence = Cadence(**found["cadence"] | {"horizons": tuple(horizons) if horizons else None})
    lists = {key: tuple(found[key]) for key in ("arms", "seeds", "tuning_seeds")}
    return Study(found["budgets"], cadence=cadence, **lists)
