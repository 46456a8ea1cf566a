"""Tables of runs beyond the study: the recipe as users call it, and settings that tied."""

from training_study import words
from training_study.design import ARMS, TASKS
from training_study.records import LOSSES
from training_study.results import BUDGETS, REFERENCE, Results
from training_study.statistics import paired
from training_study.words import Table


def recipe(results: Results) -> Table:
    """Return how the recommended recipe ends after one budget, called as users call it.

    It is compared with arms that ran on the same kind of device.
    """
    head = [
        "after one budget", "losses", "learning rate", "device", "metric", "gain over cosine",
        "gain over the arm", "gain over warm-up, stable, decay", "begins, in budgets",
    ]  # fmt: skip
    rows = []
    for found in results.checks:
        task, ours = found.task, {run.seed: run.metric for run in found.runs}
        gains = []
        for arm in (REFERENCE, "gain-start", "wsd"):
            alike = {run.where["gpu"] for run in results.runs(task, arm)} == {found.where["gpu"]}
            theirs = results.at(task, arm, 1.0) if alike else {}
            gains.append(paired(ours, theirs, lower_is_better=TASKS[task].is_text))
        rows.append([
            TASKS[task].title,
            LOSSES[found.kind],
            f"{found.lr:g}",
            words.machine(found.where),
            words.mean(task, list(ours.values())),
            *(words.difference(task, gain) for gain in gains),
            words.fractions(run.begin for run in found.runs if run.begin is not None),
        ])  # fmt: skip
    return head, rows


def tied(results: Results) -> Table:
    """Return differences to cosines with either of two settings that were equally good in trials.

    Arms that know the length are compared at the length that they know.
    """
    head = ["task", "arm"]
    for length in ("half the budget", "one budget", "twice the budget"):
        head += [f"{length}: over the reported cosine", "over the one that tied"]
    rows = []
    for task in results.tasks:
        if not any(run.task == task for run in results.tied):
            continue
        for title, metrics in _compared(results, task).items():
            row = [TASKS[task].title, title]
            for length, cosine in BUDGETS.items():
                for at in (results.at, results.at_tied):
                    ours, theirs = metrics.get(length, {}), at(task, cosine, length)
                    found = paired(ours, theirs, lower_is_better=TASKS[task].is_text)
                    row.append(words.difference(task, found))
            rows.append(row)
    return head, rows


def _compared(results: Results, task: str) -> dict[str, dict[float, dict[int, float]]]:
    """Return the metrics that are compared with cosines, by title, budgets and seed."""
    found = {
        ARMS[arm].title: {
            length: results.at(task, arm, length)
            for length in BUDGETS
            if length == 1.0 or not ARMS[arm].needs_budget
        }
        for arm in results.arms(task)
        if arm not in BUDGETS.values()
    }
    for check in results.checks:
        if (check.task, check.kind) == (task, "recipe") and check.where["gpu"]:
            title = "the recipe, with the loss of every batch"
            found[title] = {1.0: {run.seed: run.metric for run in check.runs}}
    return found
