"""G(η) with its slope, and where it departs from it."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equilibrate.estimates import Estimate
from equilibrate.landscape import Fit, Sweep

_MEASURED, _LINE, _BENT = "#0b5394", "#c0392b", "#e69138"


def draw(sweep: Sweep, fit: Fit, title: str = "") -> Figure:
    """Two panels: G against η beside the line of its slope, and the anharmonicity index."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_gradient_square(left, sweep, fit)
    _draw_index(right, fit)
    if title:
        figure.suptitle(title)
    return figure


def _draw_gradient_square(axes: Axes, sweep: Sweep, fit: Fit) -> None:
    rates = [rate.lr for rate in sweep.rates]
    used = [rate for rate in sweep.rates if rate.equilibrated]
    _bars(axes, [r.lr for r in used], [r.estimate for r in used], _MEASURED, "measured, 95 %")
    waiting = [rate for rate in sweep.rates if not rate.equilibrated]
    if waiting:
        axes.plot(
            [r.lr for r in waiting],
            [r.estimate.value for r in waiting],
            "x",
            color="0.6",
            label="FDR1 does not hold",
        )
    half = (1 - sweep.dampening) ** 2 / (2 * (1 - sweep.momentum**2))
    low, high = (fit.hessian_noise.value + s * fit.hessian_noise.margin for s in (-1, 1))
    steepness = half * fit.hessian_noise.value
    biased = ", reshuffling undone" if fit.corrected else ""
    axes.plot(
        rates,
        [steepness * lr for lr in rates],
        color=_LINE,
        label=rf"slope up to $\eta$ = {fit.linear_up_to:g}{biased}",
    )
    axes.fill_between(
        rates,
        [half * low * lr for lr in rates],
        [half * high * lr for lr in rates],
        color=_LINE,
        alpha=0.15,
        linewidth=0,
    )
    axes.axvline(fit.linear_up_to, color="0.8", linewidth=0.8, zorder=0)
    _rate_axis(axes, rates)
    axes.set_yscale("log")
    axes.set_ylabel(
        r"$G(\eta)=\langle(\nabla f)^2\rangle$"
        if sweep.momentum == 0
        else r"$(1-\nu)\langle(\nabla f)^2\rangle-\mu\langle v\cdot\nabla f\rangle$"
    )
    axes.legend(frameon=False, fontsize="small")


def _draw_index(axes: Axes, fit: Fit) -> None:
    for bends, colour, label in ((False, _MEASURED, "on the line"), (True, _BENT, "off the line")):
        some = [d for d in fit.departures if d.bends == bends]
        if some:
            _bars(axes, [d.lr for d in some], [d.index for d in some], colour, label)
    axes.axhline(0, color=_LINE, linewidth=1)
    _rate_axis(axes, [d.lr for d in fit.departures])
    axes.set_ylabel("anharmonicity index: G over the line, − 1")
    axes.legend(frameon=False, fontsize="small")


def _rate_axis(axes: Axes, rates: list[float]) -> None:
    """A logarithmic axis that names the rates that were measured."""
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{lr:g}" for lr in rates])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(r"learning rate $\eta$")


def _bars(axes: Axes, x: list[float], y: list[Estimate], colour: str, label: str) -> None:
    margins = [e.margin if math.isfinite(e.margin) else 0.0 for e in y]
    values = [e.value for e in y]
    axes.errorbar(x, values, margins, fmt="o", color=colour, capsize=3, markersize=4, label=label)
