"""Plot G(η) of a sweep with its fit. Requires matplotlib."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equilibrate.estimates import Estimate
from equilibrate.landscape import Fit, Sweep

_MEASURED, _LINE, _DEPARTED = "#0b5394", "#c0392b", "#e69138"


def draw(sweep: Sweep, fit: Fit | None, *, title: str = "") -> Figure:
    """Draw G against η with the fitted line, and the anharmonicity index.

    Args:
        sweep: The measurements.
        fit: The fit to them; None if there is none, and then only the measurements are drawn.
        title: Title of the figure.

    Returns:
        A figure with two panels, or with one if there is no fit.
    """
    figure = Figure(figsize=(9, 4) if fit else (5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, *right = figure.subplots(1, 2 if fit else 1, squeeze=False)[0]
    _draw_measured(left, sweep)
    if fit is not None:
        _draw_line(left, sweep, fit)
        _draw_index(right[0], fit)
    left.legend(frameon=False, fontsize="small")
    if title:
        figure.suptitle(title)
    return figure


def _draw_measured(axes: Axes, sweep: Sweep) -> None:
    used = [point for point in sweep.points if point.equilibrated]
    if used:
        estimates = [p.estimate for p in used]
        _draw_estimates(axes, [p.lr for p in used], estimates, _MEASURED, "measured, 95 %")
    excluded = [point for point in sweep.points if not point.equilibrated]
    if excluded:
        axes.plot(
            [p.lr for p in excluded],
            [p.estimate.value for p in excluded],
            "x",
            color="0.6",
            label="FDR1 does not hold",
        )
    _set_lr_axis(axes, [point.lr for point in sweep.points])
    axes.set_yscale("log")
    axes.set_ylabel(
        r"$G(\eta)=\langle(\nabla f)^2\rangle$"
        if sweep.momentum == 0
        else r"$(1-\nu)\langle(\nabla f)^2\rangle-\mu\langle v\cdot\nabla f\rangle$"
    )


def _draw_line(axes: Axes, sweep: Sweep, fit: Fit) -> None:
    lrs = [point.lr for point in sweep.points]
    slope_per_noise = (1 - sweep.dampening) ** 2 / (2 * (1 - sweep.momentum**2))
    low, high = (fit.hessian_noise.value + s * fit.hessian_noise.margin for s in (-1, 1))
    corrected = ", corrected for reshuffling" if fit.corrected else ""
    axes.plot(
        lrs,
        [slope_per_noise * fit.hessian_noise.value * lr for lr in lrs],
        color=_LINE,
        label=rf"slope up to $\eta$ = {fit.linear_up_to:g}{corrected}",
    )
    axes.fill_between(
        lrs,
        [slope_per_noise * low * lr for lr in lrs],
        [slope_per_noise * high * lr for lr in lrs],
        color=_LINE,
        alpha=0.15,
        linewidth=0,
    )
    axes.axvline(fit.linear_up_to, color="0.8", linewidth=0.8, zorder=0)


def _draw_index(axes: Axes, fit: Fit) -> None:
    for significant, colour, label in (
        (False, _MEASURED, "on the line"),
        (True, _DEPARTED, "off the line"),
    ):
        some = [d for d in fit.departures if d.significant == significant]
        if some:
            _draw_estimates(axes, [d.lr for d in some], [d.index for d in some], colour, label)
    axes.axhline(0, color=_LINE, linewidth=1)
    _set_lr_axis(axes, [d.lr for d in fit.departures])
    axes.set_ylabel("anharmonicity index, G/line − 1")
    axes.legend(frameon=False, fontsize="small")


def _set_lr_axis(axes: Axes, lrs: list[float]) -> None:
    """Set up a logarithmic axis with a label for each learning rate."""
    axes.set_xscale("log")
    axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(r"learning rate $\eta$")


def _draw_estimates(axes: Axes, x: list[float], y: list[Estimate], colour: str, label: str) -> None:
    margins = [e.margin if math.isfinite(e.margin) else 0.0 for e in y]
    values = [e.value for e in y]
    axes.errorbar(x, values, margins, fmt="o", color=colour, capsize=3, markersize=4, label=label)
