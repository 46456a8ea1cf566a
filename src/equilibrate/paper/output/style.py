"""How figures look: type, lines, colours, and axes of one width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from equilibrate.paper.analysis.results import Array

STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.2,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.direction": "out",
    "svg.fonttype": "path",
    "svg.hashsalt": "equilibrate",
}
WIDTH = 3.6


def stacked(rows: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Axes above each other, as high as `rows` says, with one horizontal axis."""
    figure = Figure(figsize=(WIDTH, 0.9 + 0.9 * sum(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=list(rows))
    return figure, list(axes[:, 0])


def positive(values: Array) -> Array:
    """A gap where a logarithmic axis has no place for a value."""
    return np.where(values > 0, values, np.nan)


def shades(count: int) -> list[tuple[float, float, float]]:
    """Colours in an order that can be seen."""
    palette = matplotlib.colormaps["viridis"](np.linspace(0.02, 0.88, max(count, 2)))
    return [(float(r), float(g), float(b)) for r, g, b, _ in palette[:count]]


def lighten(colour: tuple[float, float, float]) -> tuple[float, ...]:
    """The same colour, paler."""
    return tuple(1 - 0.55 * (1 - channel) for channel in colour)


def plain_ticks(axes: Axes) -> None:
    """A logarithmic axis of less than two decades, labelled in plain numbers."""
    low, high = axes.get_ylim()
    if high / low < 100:
        few, many = (1.0, 2.0, 5.0), (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
        axes.yaxis.set_major_locator(LogLocator(subs=few if high / low > 6 else many))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
