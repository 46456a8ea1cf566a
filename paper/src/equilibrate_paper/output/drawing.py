"""The figure of a training run, and files of figures that are complete or absent."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equilibrate.record import jsonl

_LEFT, _RIGHT, _LOSS, _RATE = "#0b5394", "#e69138", "#38761d", "#333333"


def training(rows: Sequence[dict[str, Any]], lr: float, title: str = "") -> Figure:
    """Draw the loss, both sides of FDR1 and the learning rate of a training run.

    Vertical lines mark the epochs after which the learning rate was lowered.

    >>> rows = [
    ...     {"epoch": 1, "loss": 2.0, "left": -1.0, "right": 0.5, "lrs": [0.1]},
    ...     {"epoch": 2, "loss": 1.0, "left": 0.5, "right": 0.5, "lrs": [0.05]},
    ... ]
    >>> [axes.get_ylabel() for axes in training(rows, 0.1).axes]
    ['loss', 'half-running averages', 'learning rate η']

    Args:
        rows: Rows of an `eq.Recorder`, one for each epoch, with the number of the `epoch`. None
            leaves a gap in a curve.
        lr: The learning rate of the first epoch.
        title: Title of the figure.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(7, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, sides, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 4, 2))
    epochs = [row["epoch"] for row in rows]
    loss.plot(epochs, _column(rows, "loss"), color=_LOSS)
    loss.set(ylabel="loss", yscale="log", title=title)

    left, right = _column(rows, "left"), _column(rows, "right")
    label = r"$\overline{O}_L$  from  $\theta\cdot\nabla f$"
    sides.plot(epochs, left, color=_LEFT, label=label)
    label = r"$\overline{O}_R$  from  $\frac{1+\mu}{2(1-\nu)}\,\eta\,v^2$"
    sides.plot(epochs, right, color=_RIGHT, linestyle="--", label=label)
    rates = [lr, *(row["lrs"][0] for row in rows)]
    label = r"equilibrated: $\eta$ lowered"
    for epoch, (before, after) in zip(epochs, pairwise(rates), strict=True):
        if after < before:
            sides.axvline(epoch, color="0.75", linewidth=0.8, zorder=0, label=label)
            label = None
    _focus(sides, [*left, *right])
    sides.set_ylabel("half-running averages")
    sides.legend(frameon=False)

    rate.step(epochs, rates[:-1], where="pre", color=_RATE)
    rate.set(yscale="log", ylabel="learning rate η", xlabel="epoch")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    return figure


def write_figure(figure: Figure, path: Path | str, **options: Any) -> Path:
    """Write a figure as `savefig` does, to a file that is complete or absent.

    Args:
        figure: The figure.
        path: The file to write.
        options: Further arguments of `savefig`.

    Returns:
        The path that was written.
    """
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix[1:], **options)
    return jsonl.write_file(path, content.getvalue())


def _column(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [math.nan if row[key] is None else row[key] for row in rows]


def _focus(axes: Axes, values: Sequence[float]) -> None:
    """Limit the vertical axis to the bulk of the values; the first epochs may lie outside."""
    finite = sorted(value for value in values if math.isfinite(value))
    if finite:
        low, high = finite[len(finite) // 20], finite[-1 - len(finite) // 20]
        margin = 0.15 * (high - low) or 1.0
        axes.set_ylim(min(low, 0.0) - margin, high + margin)
