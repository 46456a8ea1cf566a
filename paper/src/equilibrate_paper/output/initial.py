"""Figure 1: the loss and the two sides of FDR1 in an initial run."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from equilibrate_paper.analysis.results import Array, Result
from equilibrate_paper.output import style

_LOSS, _LOSS_LIGHT = "#1b6e3c", "#a9dcb5"
_LEFT, _RIGHT = "#0b5394", "#e0751b"


def draw(result: Result) -> Figure:
    """Draw the loss and the two sides of FDR1 of the first seed.

    Args:
        result: An initial run.

    Returns:
        The figure.
    """
    figure, (loss, sides) = style.stacked((1.3, 1.7))
    epoch = result.epoch
    batch, average = _first(result, "batch_loss"), _first(result, "loss")
    half_decay = result.run.task.weight_decay / 2
    loss.plot(epoch, average, color="0.5", lw=0.9, ls=(0, (2, 1)), label="cross-entropy")
    batch = batch + half_decay * _first(result, "step_norm_square")
    average = average + half_decay * _first(result, "norm_square")
    loss.plot(epoch, batch, color=_LOSS_LIGHT, lw=0.7, label=r"$f^B$")
    loss.plot(epoch, average, color=_LOSS, label=r"$\overline{f^B}$")
    loss.set_yscale("log")
    loss.set_ylabel("loss")
    loss.legend(loc="upper right")
    left, right = _first(result, "left"), _first(result, "right")
    sides.plot(epoch, style.positive(left), color=_LEFT, label=r"$\overline{O}_L$")
    sides.plot(epoch, right, color=_RIGHT, ls=(0, (3, 1.2)), label=r"$\overline{O}_R$")
    sides.set_xscale("log")
    sides.set_yscale("log")
    sides.set_xlabel("epochs")
    sides.set_ylabel("half-running averages")
    residual = left[-1] / right[-1] - 1
    ratio = rf"$\overline{{O}}_L/\overline{{O}}_R - 1$ = {_signed(100 * residual)} % at the end"
    legend = sides.legend(loc="lower right", title=ratio, title_fontsize=7.5, ncols=2)
    legend.set(frame_on=True)
    legend.get_frame().set(edgecolor="none", alpha=0.8)  # a curve near zero may run behind it
    sides.set_ylim(bottom=float(np.nanmin(right)) / 10)  # room for the legend
    style.plain_ticks(loss)
    return figure


def _signed(value: float) -> str:
    """Return a number with its sign and two places.

    >>> _signed(-0.071), _signed(0.004)
    ('−0.07', '+0.00')
    """
    return f"{value:+.2f}".replace("-", "−")


def _first(result: Result, name: str) -> Array:
    return result.column(name)[:, 0]
