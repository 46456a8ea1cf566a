"""The numbers behind figures and claims as tables, made from the records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from equilibrate.report.numbers import format_estimate
from equilibrate_paper.analysis import findings, measures
from equilibrate_paper.analysis.judged import ClaimGroup, JudgedClaim
from equilibrate_paper.analysis.measures import END
from equilibrate_paper.analysis.results import Array, Phase, Result
from equilibrate_paper.output import cells, equal_length
from equilibrate_paper.output.markdown import Table

Results = Mapping[str, Result]

_TASKS = ("mlp", "cnn")
_ARMS = {
    "preset": "preset, η/10 for each quarter",
    "adaptive": "adaptive, X = 0.01, Y = 0.1",
    "eager": "adaptive, X = 0.1, Y = 0.3",
    "amsgrad": "AMSGrad",
    "adam": "Adam",
}


def numbers(results: Results) -> list[Table]:
    """Make all tables for which there are records.

    Args:
        results: Results by the names of their runs; runs may be missing.

    Returns:
        The tables that are not empty, in the order of the figures.
    """
    results = {name: result for name, result in results.items() if len(result.epoch)}
    kinds = (
        _equilibration,
        _landscape,
        equal_length.comparison,
        equal_length.changes,
        equal_length.curvature,
    )
    found = [table(results, task) for table in kinds for task in _TASKS]
    found.append(_accuracies(results))
    found += [table for task in _TASKS for table in _grid(results, task)]
    found.append(_precision(results))
    return [table for table in found if table is not None and table.rows]


# Claims ---------------------------------------------------------------------------------------


def claim_table(group: ClaimGroup) -> Table:
    """Make a table of a group of claims.

    Args:
        group: The group.

    Returns:
        The table, with a row for each claim.
    """
    rows = [
        (
            claim.figure,
            claim.statement,
            claim.measured_text,
            claim.bound,
            claim.verdict + (f" ({claim.remark})" if claim.remark else ""),
        )
        for claim in group.claims
    ]
    return Table(group.heading, ("Figure", "Claim", "Measured", "Bound", "Verdict"), rows)


def summary(claims: Sequence[JudgedClaim]) -> Table:
    """Summarize the paper's claims in a few words, with what was found for each task.

    Args:
        claims: The judged claims; those without a short text are left out.

    Returns:
        The table, with a row for each short text and a column for each task.
    """
    found = {(claim.short, claim.task): claim for claim in claims if claim.short}
    figures = {claim.short: claim.figure.rstrip("abcd") for claim in found.values()}
    rows = [
        (figure, short, *(_outcome(found.get((short, task))) for task in _TASKS))
        for short, figure in figures.items()
    ]
    heading = "Summary (± is half a 95 % interval over seeds; points are of test accuracy)"
    return Table(heading, ("figure", "the paper says", "MLP", "CNN"), rows)


def _outcome(claim: JudgedClaim | None) -> str:
    if claim is None:
        return "–"
    return f"{claim.verdict}: {claim.short_measured}" if claim.short_measured else "not run"


def _percent(values: Array) -> str:
    """Return mean ± standard deviation over seeds of numbers in [0, 1]."""
    spread = f" ± {100 * values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{100 * values.mean():.2f}{spread}"


# FDR1 and FDR2 --------------------------------------------------------------------------------


def _equilibration(results: Results, task: str) -> Table | None:
    result, independent = results.get(f"{task}-sequence"), results.get(f"{task}-unbiased")
    if result is None:
        return None
    phases = measures.finished(result)
    fit = measures.relaxation_power(phases)
    power = "" if fit is None else f", time ∝ η^({cells.over_seeds(fit[0])})"
    columns = [
        "η",
        "L̄/R̄ − 1 at the end",
        "epochs until it stays within ± 0.1",
        "change of R̄ from half-way to the end",
        "cross-entropy",
    ]
    rows = [
        [
            f"{phase.lr:g}",
            cells.over_seeds(measures.residual(phase)),
            _relaxation_time(phase),
            format_estimate(measures.later_change(phase, "right")),
            cells.over_seeds(phase.last("loss")),
        ]
        for phase in phases
    ]
    if independent is not None:
        columns += ["L̄/R̄ − 1, independent batches", "cross-entropy, independent batches"]
        others = {phase.lr: phase for phase in measures.finished(independent)}
        for phase, row in zip(phases, rows, strict=True):
            other = others.get(phase.lr)
            row += (
                ["–", "–"]
                if other is None
                else [cells.over_seeds(v) for v in (measures.residual(other), other.last("loss"))]
            )
    used = [r for r in (result, independent) if r is not None]
    title = f"Equilibration, {result.run.task.title}{power}"
    return Table(cells.heading(title, *used), columns, rows)


def _relaxation_time(phase: Phase) -> str:
    times = measures.relaxation_times(phase)
    if np.isnan(times).any():
        return f"{np.isnan(times).sum()} of {len(times)} seeds longer than {phase.epochs}"
    mean, low, high = measures.geometric_mean(times)
    return f"{mean:.3g}" + ("" if math.isnan(low) else f" ({low:.3g} to {high:.3g})")


def _landscape(results: Results, task: str) -> Table | None:
    both = [results[name] for kind in _BATCHES if (name := f"{task}-{kind}") in results]
    if not both:
        return None
    phases = {r.run.name: {phase.lr: phase for phase in measures.finished(r)} for r in both}
    columns = ["η"]
    for result in both:
        kind = _BATCHES[result.run.name.removeprefix(f"{task}-")]
        columns += [f"O_FB, {kind}", f"O_FB/η, {kind}"]
    if len(both) == 2:
        columns.append("reshuffled − independent")
        if both[0].run.momentum:
            columns.append("by the second term, at most (predicted)")
    rows = []
    for lr in sorted({lr for found in phases.values() for lr in found}, reverse=True):
        row = [f"{lr:g}"]
        values = [cells.landscape(found.get(lr)) for found in phases.values()]
        for value in values:
            row += [format_estimate(value), format_estimate(value.scaled(1 / lr))]
        if len(both) == 2:
            row.append(format_estimate(values[0].minus(values[1])))
            if both[0].run.momentum:
                shuffled = phases[both[0].run.name].get(lr)
                row.append("–" if shuffled is None else _offset(shuffled))
        rows.append(row)
    return Table(cells.heading(f"O_FB, {both[0].run.task.title}", *both), columns, rows)


_BATCHES = {"sequence": "reshuffled", "unbiased": "independent"}


def _offset(phase: Phase) -> str:
    return f"{measures.reshuffling_offset(phase):.2g}".replace("-", "−")


# Schedules ------------------------------------------------------------------------------------


def _accuracies(results: Results) -> Table:
    names = [f"{task}-{kind}" for task in _TASKS for kind in ("schedules", "amsgrad", "adam")]
    used = [results[name] for name in names if name in results]
    rows = []
    for result in used:
        for arm in result.run.arms:
            rates = result.column("lr", arm)[-1]
            ends = dict.fromkeys(f"{lr:.2g}" for lr in (rates.min(), rates.max()))
            rows.append(
                (
                    result.run.task.title,
                    _ARMS[arm],
                    _percent(measures.accuracy(result, arm, END)),
                    _percent(measures.accuracy(result, arm, END, "train_accuracy")),
                    " to ".join(ends),
                    f"{len(result.run.seeds)}",
                )
            )
    columns = ("Task", "Schedule", "test accuracy (%)", "training accuracy (%)", "last η", "seeds")
    return Table(cells.heading("Final accuracies, mean ± s.d. over seeds", *used), columns, rows)


def _grid(results: Results, task: str) -> list[Table]:
    result = results.get(f"{task}-grid")
    if result is None:
        return []
    found = measures.grid(result)
    columns = ["X \\ Y", *(f"{y:g}" for y in found.decreases)]

    def table(heading: str, values: Array, places: int) -> Table:
        rows = [
            [f"{x:g}", *(f"{v:.{places}f}" if np.isfinite(v) else "never" for v in row)]
            for x, row in zip(found.thresholds, values, strict=True)
        ]
        return Table(cells.heading(f"{heading}, {result.run.task.title}", result), columns, rows)

    return [
        table("Final test accuracy (%) over X and Y", 100 * found.accuracy, 2),
        table("Epochs until it stays there, over X and Y", found.arrival, 0),
    ]


# Precision ------------------------------------------------------------------------------------


def _precision(results: Results) -> Table:
    rows, used = [], []
    for task in _TASKS:
        own = [
            results[name] for kind in measures.PRECISIONS if (name := f"{task}-{kind}") in results
        ]
        used += own
        phases = {r.run.precision: phase for r in own for phase in measures.finished(r)}
        for precision, phase in phases.items():
            single = phases.get("fp32") if precision != "fp32" else None
            rows.append(
                (
                    phase.result.run.task.title,
                    measures.PRECISIONS[precision],
                    cells.over_seeds(measures.residual(phase)),
                    _difference(single, phase, measures.residual),
                    cells.over_seeds(phase.last("landscape")),
                    _difference(single, phase, lambda phase: phase.last("landscape")),
                )
            )
    columns = ("Task", "precision", "L̄/R̄ − 1", "− single", "O_FB", "− single")
    heading = f"Precision of products; differences at 95 % for all {findings.COMPARISONS} together"
    return Table(cells.heading(heading, *used), columns, rows)


def _difference(single: Phase | None, phase: Phase, quantity: findings.Quantity) -> str:
    if single is None:
        return "–"
    return format_estimate(findings.precision_difference(single, phase, quantity))
