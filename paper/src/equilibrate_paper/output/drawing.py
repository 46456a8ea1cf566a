"""Figures drawn from the rows of a record with matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equilibrate.runlog import files

LEFT, RIGHT, LOSS, RATE = "#0b5394", "#e69138", "#38761d", "#333333"


def training(rows: Sequence[dict[str, Any]], title: str = "") -> Figure:
    """Draw the loss, both sides of FDR1 and the learning rate of a training run.

    Vertical lines mark the epochs after which the learning rate was lowered.

    >>> rows = [
    ...     {"epoch": 1, "loss": 2.0, "left": -1.0, "right": 0.5, "lr": 0.1, "lowered": False},
    ...     {"epoch": 2, "loss": 1.0, "left": 0.5, "right": 0.5, "lr": 0.1, "lowered": True},
    ... ]
    >>> [axes.get_ylabel() for axes in training(rows).axes]
    ['loss', 'half-running averages', 'learning rate η']

    Args:
        rows: One mapping per epoch with the keys `epoch`, `loss`, `left`, `right`, `lr` (a number,
            or one for each parameter group) and `lowered`. None leaves a gap in a curve.
        title: Title of the figure.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(7, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, sides, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 4, 2))
    epochs = [row["epoch"] for row in rows]
    loss.plot(epochs, _column(rows, "loss"), color=LOSS)
    loss.set_ylabel("loss")
    loss.set_yscale("log")
    if title:
        loss.set_title(title)

    left, right = _column(rows, "left"), _column(rows, "right")
    sides.plot(epochs, left, color=LEFT, label=r"$\overline{O}_L$  from  $\theta\cdot\nabla f$")
    sides.plot(
        epochs,
        right,
        color=RIGHT,
        linestyle="--",
        label=r"$\overline{O}_R$  from  $\frac{1+\mu}{2(1-\nu)}\,\eta\,v^2$",
    )
    lowered = [row["epoch"] for row in rows if row["lowered"]]
    for number, epoch in enumerate(lowered):
        label = r"equilibrated: $\eta$ lowered" if number == 0 else None
        sides.axvline(epoch, color="0.75", linewidth=0.8, zorder=0, label=label)
    _focus(sides, [*left, *right])
    sides.set_ylabel("half-running averages")
    sides.legend(frameon=False)

    rates = [row["lr"] if isinstance(row["lr"], Sequence) else [row["lr"]] for row in rows]
    for group in zip(*rates, strict=True):
        rate.step(epochs, _numbers(group), where="pre", color=RATE)
    rate.set_yscale("log")
    rate.set_ylabel("learning rate η")
    rate.set_xlabel("epoch")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    return figure


def save(figure: Figure, path: Path | str) -> Path:
    """Write a figure to a file, in the format of the file's suffix.

    Args:
        figure: The figure.
        path: The file to write; its folder is created if necessary.

    Returns:
        The path that was written.
    """
    return write_figure(figure, path, dpi=150)


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
    return files.write(path, content.getvalue())


def _column(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return _numbers([row[key] for row in rows])


def _numbers(values: Sequence[float | None]) -> list[float]:
    """Return the values with None replaced by nan, which leaves a gap in a curve."""
    return [math.nan if value is None else value for value in values]


def _focus(axes: Axes, values: Sequence[float]) -> None:
    """Limit the vertical axis to the bulk of the values; the first epochs may lie outside."""
    finite = sorted(value for value in values if math.isfinite(value))
    if finite:
        low, high = finite[len(finite) // 20], finite[-1 - len(finite) // 20]
        margin = 0.15 * (high - low) or 1.0
        axes.set_ylim(min(low, 0.0) - margin, high + margin)
