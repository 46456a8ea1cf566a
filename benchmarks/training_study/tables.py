"""Tables of a study, from its records alone."""

import math
from collections.abc import Mapping
from typing import Any

from training_study import statistics, tables_of_checks, words
from training_study.design import ARMS, TASKS
from training_study.records import RunRecord
from training_study.results import BUDGETS, REFERENCE, Results
from training_study.statistics import Difference, mean
from training_study.words import Table

EQUILIBRIUM = ("paper-0.01", "paper-0.1", "stationary", "gain-known", "gain-start")
"""Arms with the library's own rules."""
PAIRS = (
    ("gain-start", "wsd"),
    ("gain-start", "gain-known"),
    ("averaged", "wsd"),
    ("averaged", "schedule-free"),
    ("averaged", "constant"),
)
"""Arms that are compared with each other."""
Place = tuple[str, str, float]
"""A task, an arm and a number of budgets."""


def known(results: Results, task: str) -> Table:
    """Return the metric after one budget: what the arms that know the budget were made for."""
    head = [
        "arm", "setting", words.metric(task), "gain over cosine", "mean over the run",
        "steps to 99 % of the best",
    ]  # fmt: skip
    goal = statistics.goal(results.best(task), lower_is_better=TASKS[task].is_text)
    rows = []
    for arm in results.arms(task):
        values = results.at(task, arm, 1.0)
        if not values or ARMS[arm].as_tuned:
            continue
        runs = results.runs(task, arm)
        difference = results.difference(task, arm, 1.0) if arm != REFERENCE else None
        rows.append([
            ARMS[arm].title,
            words.setting(runs[0].setting, " (end of the grid)" * at_the_end(results, runs[0])),
            words.mean(task, list(values.values())),
            words.difference(task, difference),
            words.mean(task, [statistics.area(r.steps, r.metrics, r.budget) for r in runs]),
            words.steps([
                statistics.first_reaching(
                    r.steps, r.metrics, goal, lower_is_better=TASKS[task].is_text
                )
                for r in runs
            ]),
        ])  # fmt: skip
    return head, rows


def at_the_end(results: Results, run: RunRecord) -> bool:
    """Return whether the chosen learning rate is the first or last of those that were tried."""
    rates = [trial.setting["lr"] for trial in results.trials(run.task, run.arm)]
    return bool(rates) and run.setting["lr"] in (min(rates), max(rates))


def costs(results: Results, task: str) -> Table:
    """Return what a step of each arm takes, and what is left of its metric for equal time."""
    head = ["arm", "a step, relative to a bare one", f"{words.metric(task)}, time charged"]
    rows = []
    for arm in results.arms(task):
        row = results.overhead.get(task, {}).get(ARMS[arm].cost)
        if ARMS[arm].as_tuned or row is None:
            continue
        low, high = row["ratio_interval"]
        runs = results.runs(task, arm)
        charged = [statistics.interpolated(run, run.budget / row["ratio"]) for run in runs]
        ratio = f"{row['ratio']:.3f} ({low:.3f} to {high:.3f})"
        rows.append([ARMS[arm].title, ratio, words.number(task, mean(charged).value)])
    return head, rows


def unknown(results: Results, task: str) -> Table:
    """Return the metric when the training ends sooner or later than planned."""
    head = ["arm"]
    for length in ("half the budget", "twice the budget"):
        head += [length, "gain over cosine for budget 1", "gain over cosine for this one"]
    rows = []
    for arm in results.arms(task):
        row = [ARMS[arm].title]
        for budgets in (0.5, 2.0):
            values = results.at(task, arm, budgets)
            row.append(words.mean(task, list(values.values())) if values else "–")
            for reference in (REFERENCE, BUDGETS[budgets]):
                same = arm == reference or not values
                difference = None if same else results.difference(task, arm, budgets, reference)
                row.append(words.difference(task, difference))
        rows.append(row)
    return head, rows


def acting(results: Results, task: str) -> Table:
    """Return when rules act, and how that varies over seeds."""
    head = [
        "rule", "times in two budgets", "first, in budgets", "spread of the first over seeds",
        "spread of all over seeds", "silent runs",
    ]  # fmt: skip
    rows = []
    for arm in results.arms(task):
        if ARMS[arm].rule:
            runs = results.runs(task, arm)
            found = statistics.moments(runs)
            numbers = (found.first, found.first_spread, found.spread)
            rows.append([
                ARMS[arm].title,
                f"{found.count:.1f}",
                *("–" if math.isnan(x) else f"{x:.3f}" for x in numbers),
                f"{found.silent} of {len(runs)}",
            ])  # fmt: skip
    return head, rows


def equilibrium(results: Results) -> Table:
    """Return by how much rules that wait for equilibrium, or forecast, differ from cosine."""
    head = ["after one budget", *(ARMS[arm].title for arm in EQUILIBRIUM)]
    rows = [
        [TASKS[task].title]
        + [words.difference(task, results.difference(task, arm, 1.0)) for arm in EQUILIBRIUM]
        for task in results.tasks
    ]
    return head, rows


def without_length(results: Results) -> Table:
    """Return arms that do not know the length of the training against cosines that do.

    Differences that remain significant among so many tests are bold.
    """
    head = ["1/2 / 1 / 2 budgets", *(TASKS[task].title for task in results.tasks)]
    arms = [arm for arm in ARMS if not ARMS[arm].needs_budget]
    found = {
        (task, arm, budgets): difference
        for arm in arms
        for task in results.tasks
        for budgets, cosine in BUDGETS.items()
        if (difference := results.difference(task, arm, budgets, cosine)) is not None
    }
    bold = _significant(found)

    def cell(place: Place) -> str:
        text = words.difference(place[0], found.get(place), verdict=False)
        return f"**{text}**" if place in bold else text

    rows = [
        [ARMS[arm].title]
        + [" / ".join(cell((task, arm, b)) for b in BUDGETS) for task in results.tasks]
        for arm in arms
    ]
    return head, rows


def pairs(results: Results) -> Table:
    """Return by how much some arms differ from others than cosine."""
    head = ["after one budget", *(TASKS[task].title for task in results.tasks)]
    rows = [
        [f"{ARMS[arm].title}; against {ARMS[other].title}"]
        + [
            words.difference(task, results.difference(task, arm, 1.0, other))
            for task in results.tasks
        ]
        for arm, other in PAIRS
    ]
    return head, rows


def verdicts(results: Results) -> Table:
    """Return a row for each arm: its verdicts against cosine at 1/2, 1 and 2 budgets, by task.

    Those that remain significant among so many tests are bold.
    """
    head = ["arm", "must know the budget", *(TASKS[task].title for task in results.tasks)]
    arms = [arm for arm in ARMS if arm != REFERENCE and not ARMS[arm].as_tuned]
    places = [(task, arm, b) for arm in arms for task in results.tasks for b in BUDGETS]
    found = {
        place: difference
        for place in places
        if (difference := results.difference(*place)) is not None
    }
    bold = _significant(found)

    def cell(place: Place) -> str:
        if place not in found:
            return "–"
        return f"**{found[place].verdict}**" if place in bold else found[place].verdict

    rows = []
    for arm in arms:
        cells = [" / ".join(cell((task, arm, b)) for b in BUDGETS) for task in results.tasks]
        if any(set(cell) - set("–/ ") for cell in cells):
            rows.append([ARMS[arm].title, "yes" if ARMS[arm].needs_budget else "no", *cells])
    return head, rows


def made_with(results: Results) -> Table:
    """Return what was run, and on what."""
    head = [
        "task", "steps of a budget", "trials of an arm", "seeds of an arm", "reported runs",
        "diverged", "machines", "commits",
    ]  # fmt: skip
    rows = []
    for task in results.tasks:
        runs = [record for record in results.final if record.task == task]
        arms = [arm for arm in results.arms(task) if not ARMS[arm].as_tuned]
        rows.append([
            TASKS[task].title,
            f"{runs[0].budget:,}",
            words.span(len(results.trials(task, arm)) for arm in arms),
            words.span(len(results.runs(task, arm)) for arm in arms),
            str(len(runs)),
            str(sum(record.diverged for record in runs)),
            "; ".join(sorted({_built_with(r.where) for r in runs})),
            ", ".join(sorted({(r.where["commit"] or "unknown")[:9] for r in runs})),
        ])  # fmt: skip
    return head, rows


def _built_with(where: Mapping[str, Any]) -> str:
    return f"{words.machine(where)}, torch {where['torch']}"


def tables(results: Results) -> dict[str, Table]:
    """Return all tables by the names of their places in the page."""
    found = {
        "training, runs": made_with(results),
        "training, equilibrium": equilibrium(results),
        "training, without the length": without_length(results),
        "training, pairs": pairs(results),
        "training, recipe": tables_of_checks.recipe(results),
        "training, tied": tables_of_checks.tied(results),
        "training, verdicts": verdicts(results),
    }
    for task in results.tasks:
        found[f"training, {task}"] = known(results, task)
        found[f"training, {task}, other budgets"] = unknown(results, task)
        found[f"training, {task}, moments"] = acting(results, task)
        found[f"training, {task}, costs"] = costs(results, task)
    return found


def _significant(found: Mapping[Place, Difference]) -> set[Place]:
    """Return where differences remain significant, by the procedure of Benjamini and Hochberg."""
    values = [statistics.p_value(difference.estimate) for difference in found.values()]
    return {list(found)[i] for i in statistics.discoveries(values)}
