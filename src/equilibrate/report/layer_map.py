"""A heat map of the layers of a model over time, drawn with matplotlib from recorded rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

_MULTIPLES = (1, 3, 10, 30)
"""Multiples of the tolerance at which the colour changes."""
_UNDEFINED = "0.75"
_MARK = "⊥"


def layer_map(
    rows: Sequence[dict[str, Any]], *, tolerance: float = 0.05, title: str = ""
) -> Figure:
    """Draw the residual of each layer over time.

    A layer is white while its residual is within the tolerance, red while its norm falls and blue
    while it grows, the darker the farther from equilibrium, and grey where its residual is
    undefined. A dot marks residuals that noise alone could explain. ⊥ marks the layers that were
    scale-invariant in the last row.

    >>> from equilibrate.report.layer_map import layer_map
    >>> layers = {"conv": {"residual": 0.2, "scale_invariant": True}, "head": {"residual": None}}
    >>> figure = layer_map([{"step": 100, "layers": layers}])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['conv ⊥', 'head']

    Args:
        rows: Rows of `layers.LayerTable.row`, in the order of their steps. Of each layer
            `residual`, None or nan if it is undefined, `state` and `scale_invariant` are used.
        tolerance: Residual within which a layer is shown as equilibrated.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no rows, or `tolerance` is not positive.
    """
    if not rows:
        raise ValueError("rows is empty: pass at least one row of layers.LayerTable.row()")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, such as 0.05, got {tolerance}")
    names = list(dict.fromkeys(name for row in rows for name in row["layers"]))
    residuals = np.array([[_residual(row, name) for row in rows] for name in names])
    steps = [row["step"] for row in rows]
    edges = [max(0, steps[0] - (steps[1] - steps[0] if len(steps) > 1 else steps[0])), *steps]

    figure = Figure(figsize=(8, 1.4 + 0.26 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bounds = [tolerance * multiple for multiple in _MULTIPLES]
    norm = BoundaryNorm([-b for b in reversed(bounds)] + bounds, 2 * len(bounds) + 1, extend="both")
    mesh = axes.pcolormesh(
        edges,
        np.arange(len(names) + 1),
        np.ma.masked_invalid(residuals),
        cmap=_colours(),
        norm=norm,
    )
    axes.set_facecolor(_UNDEFINED)
    dots = [
        ((edges[column] + edges[column + 1]) / 2, place + 0.5)
        for place, name in enumerate(names)
        for column, row in enumerate(rows)
        if row["layers"].get(name, {}).get("state") == "not resolved"
    ]
    if dots:
        axes.plot(*zip(*dots, strict=True), ".", color="0.35", markersize=2.5, linestyle="none")
    axes.set_yticks(np.arange(len(names)) + 0.5, [_label(name, rows[-1]) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("step")
    if title:
        axes.set_title(title)
    bar = figure.colorbar(mesh, ax=axes, label="residual L/R − 1", spacing="uniform", pad=0.02)
    bar.ax.set_yticks(norm.boundaries, [f"{b:+.2g}".replace("-", "−") for b in norm.boundaries])
    return figure


def _residual(row: dict[str, Any], name: str) -> float:
    value = row["layers"].get(name, {}).get("residual")
    return math.nan if value is None else value


def _label(name: str, row: dict[str, Any]) -> str:
    return f"{name} {_MARK}" if row["layers"].get(name, {}).get("scale_invariant") else name


def _colours() -> ListedColormap:
    """Return blues, white and reds, one for each interval of residuals."""
    side = len(_MULTIPLES)
    shades = mpl.colormaps["RdBu_r"](np.linspace(0, 1, 2 * side + 1))
    shades[side] = 1.0
    return ListedColormap(shades)
