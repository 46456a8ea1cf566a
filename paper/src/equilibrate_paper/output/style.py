"""Style of the figures: fonts, lines, colours, and axes of one width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from equilibrate_paper.analysis.results import Array

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
"""Settings of matplotlib."""
WIDTH = 3.6
"""Width of a figure in inches."""


def stacked(rows: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Create axes above each other that share the horizontal axis.

    Args:
        rows: Heights of the axes.

    Returns:
        The figure and its axes, from top to bottom.
    """
    figure = Figure(figsize=(WIDTH, 0.9 + 0.9 * sum(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=list(rows))
    return figure, list(axes[:, 0])


def positive(values: Array) -> Array:
    """Replace values that a logarithmic axis cannot show by nan.

    Args:
        values: Any values.

    Returns:
        The values, with nan where they are not positive.
    """
    return np.where(values > 0, values, np.nan)


def shades(count: int) -> list[tuple[float, float, float]]:
    """Choose colours that show an order.

    Args:
        count: The number of colours.

    Returns:
        Red, green and blue of each colour, between 0 and 1.
    """
    palette = matplotlib.colormaps["viridis"](np.linspace(0.02, 0.88, max(count, 2)))
    return [(float(r), float(g), float(b)) for r, g, b, _ in palette[:count]]


def lighten(colour: tuple[float, float, float]) -> tuple[float, ...]:
    """Make a colour paler.

    Args:
        colour: Red, green and blue, between 0 and 1.

    Returns:
        The paler colour.
    """
    return tuple(1 - 0.55 * (1 - channel) for channel in colour)


def plain_ticks(axes: Axes) -> None:
    """Label a logarithmic vertical axis of less than two decades with plain numbers.

    Args:
        axes: The axes to change.
    """
    low, high = axes.get_ylim()
    if high / low < 100:
        few, many = (1.0, 2.0, 5.0), (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
        axes.yaxis.set_major_locator(LogLocator(subs=few if high / low > 6 else many))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
