"""Tables about reshuffled and independent batches in runs of equal length."""

from __future__ import annotations

import math
from collections.abc import Mapping

from equilibrate.report.numbers import format_estimate
from equilibrate_paper.analysis import measures, shuffling
from equilibrate_paper.analysis.results import Result
from equilibrate_paper.output import cells
from equilibrate_paper.output.markdown import Table
from equilibrate_paper.protocol.panels import PANELS

Results = Mapping[str, Result]

_BATCHES = {"shuffled": "reshuffled", "independent": "independent"}


def comparison(results: Results, task: str) -> Table | None:
    """Compare FDR1 and O_FB at each η.

    Args:
        results: Results by the names of their runs.
        task: "mlp" or "cnn".

    Returns:
        The table, or None if one of the two runs is missing.
    """
    both = _both(results, task)
    if both is None:
        return None
    shuffled, independent = ({p.lr: p for p in measures.finished(r)} for r in both)
    ratios = shuffling.ratios(*both)
    rows = []
    for lr in [lr for lr in shuffled if lr in ratios]:
        pair = [phases[lr] for phases in (shuffled, independent)]
        row = [cells.over_seeds(measures.residual(phase)) for phase in pair]
        row += [format_estimate(cells.landscape(phase).scaled(1 / lr)) for phase in pair]
        rows.append([f"{lr:g}", *row, format_estimate(ratios[lr].shifted(-1))])
    columns = (
        "η",
        "L̄/R̄ − 1, reshuffled",
        "L̄/R̄ − 1, independent",
        "O_FB/η, reshuffled",
        "O_FB/η, independent",
        "O_FB, reshuffled / independent − 1",
    )
    title = f"Batches in runs of equal length, {both[0].run.task.title}"
    return Table(cells.heading(title, *both), columns, rows)


def curvature(results: Results, task: str) -> Table | None:
    """Show the one curvature that was fitted to the ratios of O_FB.

    Args:
        results: Results by the names of their runs.
        task: "mlp" or "cnn".

    Returns:
        The table, or None if a run is missing or there is no fit.
    """
    both = _both(results, task)
    fit = None if both is None else shuffling.fit_runs(*both)
    if both is None or fit is None:
        return None
    high = "∞" if math.isinf(fit.high) else f"{fit.high:.2f}"
    row = (
        f"{fit.curvature:.2f}",
        f"{fit.low:.2f} to {high}",
        f"{fit.chi_square:.1f}",
        f"{fit.dof}",
    )
    columns = ("curvature h", "95 % interval", "χ²", "degrees of freedom")
    title = f"One curvature fitted to the ratios of O_FB, {both[0].run.task.title}"
    return Table(cells.heading(title, *both), columns, [row])


def changes(results: Results, task: str) -> Table | None:
    """Show how O_FB/η changes with η, and during the phase with the smallest η.

    The paper's sequence and the first run with independent batches are shown too, if recorded.

    Args:
        results: Results by the names of their runs.
        task: "mlp" or "cnn".

    Returns:
        The table, or None if one of the two runs of equal length is missing.
    """
    both = _both(results, task)
    if both is None:
        return None
    others = [results[n] for n in (f"{task}-sequence", f"{task}-unbiased") if n in results]
    used = [*others, *(result for result in both if result not in others)]
    rows = []
    for result in used:
        phases = sorted(measures.finished(result), key=lambda phase: phase.lr)
        if len(phases) < 2:
            continue
        last = phases[0]
        middle, end = (
            values / last.lr
            for values in (measures.halfway(last, "landscape"), last.last("landscape"))
        )
        rows.append(
            (
                result.run.name,
                _BATCHES[result.run.sampling],
                f"{len(result.run.seeds)}",
                f"{phases[-1].lr:g} to {last.lr:g}",
                format_estimate(measures.landscape_change(result)),
                f"{last.epochs}",
                cells.over_seeds(middle),
                cells.over_seeds(end),
                format_estimate(measures.later_change(last, "landscape")),
            )
        )
    columns = (
        "Run",
        "batches",
        "seeds",
        "η",
        "change of O_FB/η over these η",
        "epochs at the smallest η",
        "O_FB/η half-way there",
        "O_FB/η at the end",
        "change",
    )
    title = f"Changes of O_FB/η with η and with time, {both[0].run.task.title}"
    return Table(cells.heading(title, *used), columns, rows)


def _both(results: Results, task: str) -> tuple[Result, Result] | None:
    """Return the runs with reshuffled and with independent batches, if both are recorded."""
    shuffled, independent = PANELS["B4a" if task == "mlp" else "B4b"].runs
    if shuffled not in results or independent not in results:
        return None
    return results[shuffled], results[independent]
