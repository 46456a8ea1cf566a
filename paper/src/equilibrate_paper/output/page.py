"""The HTML page of a reproduction: claims, figures, numbers, protocol and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from equilibrate_paper.analysis import verdicts
from equilibrate_paper.analysis.judged import JudgedClaim
from equilibrate_paper.analysis.results import Result
from equilibrate_paper.output import figures, html
from equilibrate_paper.output.markdown import Table
from equilibrate_paper.protocol import schedules as protocols
from equilibrate_paper.protocol.panels import PANELS

_NAMES = {"sgd": "SGD", "adam": "Adam", "amsgrad": "AMSGrad"}


def compose(
    out: Path,
    claims: Sequence[JudgedClaim],
    panels: Sequence[str],
    recorded: Mapping[str, Result],
    numbers: Sequence[Table],
) -> str:
    """Compose the page about the panels that were drawn.

    Args:
        out: Folder of the reproduction, with the figures in `out/figures`.
        claims: All judged claims; those about other panels are left out.
        panels: The panels that were drawn.
        recorded: Results by the names of their runs.
        numbers: Tables to show below the figures.

    Returns:
        The HTML text.
    """
    first = next(iter(recorded.values()))
    summary = [
        "The experiments of “Fluctuation-dissipation relations for stochastic gradient descent”, "
        "reproduced: all of its figures, and each claim of its text compared with measurements. "
        "Figures whose names begin with B, and the second table of claims, are not in the paper.",
    ]
    if first.profile != "paper":
        summary.append(
            f"This is the {first.profile} profile: small models on scikit-learn's digits. It shows "
            "the relations within minutes, but cannot test what the paper claims about MNIST and "
            "CIFAR-10."
        )
    absent = [panel for panel in PANELS if panel not in panels]
    if absent:
        summary.append(
            f"These figures were not drawn, and claims about them are not shown: "
            f"{', '.join(absent)}."
        )
    return html.render(
        "The paper, reproduced",
        summary,
        verdicts.grouped(claims, panels),
        [
            html.Illustration(
                panel, out / "figures" / f"fig{panel}.svg", figures.caption(panel, recorded)
            )
            for panel in panels
        ],
        [
            *numbers,
            _protocol_table(list(recorded.values())),
            _environment_table(list(recorded.values())),
        ],
    )


def _protocol_table(found: Sequence[Result]) -> Table:
    columns = ("Run", "Task", "Training", "Schedules", "Epochs", "Seeds")
    rows = []
    for result in found:
        run = result.run
        training = f"{_NAMES[run.algorithm]}, batches of {run.task.batch_size}, "
        training += f"λ = {run.task.weight_decay:g}"
        if run.momentum:
            training += f", μ = {run.momentum:g}"
        if run.sampling == "independent":
            training += ", independent batches"
        start = f" (from the end of {run.start})" if run.start else ""
        rows.append(
            (
                run.name + start,
                run.task.title,
                training,
                _schedules(list(run.arms.values())),
                f"{result.epochs_done} of {run.full_epochs}",
                f"{len(run.seeds)} of {run.full_seeds}",
            )
        )
    return Table("Protocol", columns, rows)


def _schedules(schedules: Sequence[protocols.Schedule]) -> str:
    """Return all schedules, or the axes of a complete grid of adaptive ones.

    >>> grid = [
    ...     protocols.Adaptive(0.1, 400, x, 1 - y) for x in (0.01, 0.1) for y in (0.1, 0.3, 0.5)
    ... ]
    >>> _schedules(grid)
    'from η = 0.1, each X of 0.01, 0.1 with each Y of 0.1, 0.3, 0.5'
    >>> _schedules(grid[:1])
    'from η = 0.1, X = 0.01, Y = 0.1'
    """
    grid = [(s.lr, s.threshold, s.decrease) for s in schedules if isinstance(s, protocols.Adaptive)]
    axes = [sorted(set(axis)) for axis in zip(*grid, strict=True)]
    if len(grid) == len(schedules) > 2 and sorted(grid) == [*product(*axes)]:
        lrs, tolerances, decreases = (", ".join(f"{v:g}" for v in axis) for axis in axes)
        return f"from η = {lrs}, each X of {tolerances} with each Y of {decreases}"
    return "; ".join(_describe(schedule) for schedule in schedules)


def _describe(schedule: protocols.Schedule) -> str:
    if isinstance(schedule, protocols.PiecewiseConstant):
        return " → ".join(f"η = {lr:g} for {epochs}" for lr, epochs in schedule.phases)
    return f"from η = {schedule.lr:g}, X = {schedule.threshold:g}, Y = {schedule.decrease:g}"


def _environment_table(found: Sequence[Result]) -> Table:
    """Return where the runs were made, with all values that differ between them."""
    environments = [{**result.environment, "device": result.device} for result in found]
    rows = []
    for key in dict.fromkeys(key for environment in environments for key in environment):
        values = [environment[key] for environment in environments if key in environment]
        texts = list(dict.fromkeys(str(value) for value in values if value is not None))
        if key == "started":
            texts = [" to ".join(dict.fromkeys((min(texts), max(texts))))]
        rows.append((key, ", ".join(texts) or "–"))
    return Table("Environment", ("What", "Value"), rows)
