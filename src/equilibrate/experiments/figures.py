"""Every panel of the paper's figures, drawn from the records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from equilibrate.experiments import statistics
from equilibrate.experiments.panels import PANELS
from equilibrate.experiments.results import Array, Result

Results = Mapping[str, Result]

_STYLE: Any = {
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
_WIDTH = 3.6
_LOSS, _LOSS_LIGHT = "#1b6e3c", "#a9dcb5"
_LEFT, _RIGHT = "#0b5394", "#e0751b"
_ARMS = {
    "preset": ("#222222", "preset"),
    "adaptive": ("#1f5fd0", "adaptive, $X$ = 0.01, $Y$ = 0.1"),
    "eager": ("#8a3ab9", "adaptive, $X$ = 0.1, $Y$ = 0.3"),
    "amsgrad": ("#2a9d4a", "AMSGrad"),
    "adam": ("#e8871e", "Adam"),
}
_TEST = (0, (2.5, 1.2))
_KINDS = (
    Line2D([], [], color="0.4", lw=1, label="training images"),
    Line2D([], [], color="0.4", lw=1, ls=_TEST, label="test images"),
)


def draw(panel: str, results: Results) -> Figure:
    """Draw one panel, "1a" to "S2d", from results that hold its runs."""
    if panel not in PANELS:
        raise ValueError(f"panel={panel!r} is unknown; choose from {', '.join(PANELS)}")
    mine = [results[name] for name in PANELS[panel].runs]
    kind = panel.rstrip("abcd")
    with matplotlib.rc_context(_STYLE):
        if kind == "1":
            figure = _initial(mine[0])
        elif kind == "2":
            figure = _sequence(mine[0])
        elif kind == "3":
            figure = _landscape(mine[0])
        elif kind == "4":
            figure = _schedules(mine, ("preset", "adaptive", "amsgrad"), 0)
        elif kind == "S1":
            figure = _schedules(mine[::-1], ("amsgrad", "adam"), 0, rate=False)
        else:
            figure = _schedules(mine, ("preset", "eager", "amsgrad"), "abcd".index(panel[-1]))
        _head(figure, panel, mine)
    return figure


def caption(panel: str, results: Results) -> str:
    """The panel's caption in our words."""
    run = results[PANELS[panel].runs[0]].run
    seed = "abcd".index(panel[-1])
    return PANELS[panel].caption.format(title=run.task.title, seed=seed)


def save(panel: str, results: Results, folder: Path | str) -> tuple[Path, Path]:
    """Write fig1a.png and fig1a.svg, say, into `folder`; the same records give the same files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    figure = draw(panel, results)
    png, svg = folder / f"fig{panel}.png", folder / f"fig{panel}.svg"
    with matplotlib.rc_context(_STYLE):
        figure.savefig(png, dpi=200, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None})
    return png, svg


def _figure(rows: Sequence[float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, 0.9 + 0.9 * sum(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=list(rows))
    return figure, list(axes[:, 0])


def _head(figure: Figure, panel: str, results: Sequence[Result]) -> None:
    """Panel letter, title, and what is missing where a run is not whole."""
    run = results[0].run
    title = run.task.title
    if panel[0] in "123":
        title += rf", $\mu$ = {run.momentum:g}"
    elif panel[0] == "4":
        title += r", $\mu$ = 0"
    elif panel.startswith("S2"):
        title += rf", $\mu$ = 0, seed {'abcd'.index(panel[-1])}"
    figure.axes[0].set_title(rf"$\bf{{{panel}}}$   {title}", loc="left")
    figure.align_ylabels()
    missing = dict.fromkeys(f"{r.run.name}: {s}" for r in results if (s := r.shortfall))
    if missing:
        figure.supxlabel("incomplete – " + "; ".join(missing), fontsize=6.5, color="#b00020")


def _initial(result: Result) -> Figure:
    figure, (loss, sides) = _figure((1.3, 1.7))
    epoch = result.epoch
    loss.plot(epoch, _first(result, "batch_loss"), color=_LOSS_LIGHT, lw=0.7, label=r"$f^B$")
    loss.plot(epoch, _first(result, "loss"), color=_LOSS, label=r"$\overline{f^B}$")
    loss.set_yscale("log")
    loss.set_ylabel("cross-entropy")
    loss.legend(loc="upper right", ncols=2)
    left, right = _first(result, "left"), _first(result, "right")
    sides.plot(epoch, _positive(left), color=_LEFT, label=r"$\overline{O}_L$")
    sides.plot(epoch, right, color=_RIGHT, ls=(0, (3, 1.2)), label=r"$\overline{O}_R$")
    sides.set_xscale("log")
    sides.set_yscale("log")
    sides.set_xlabel("epochs")
    sides.set_ylabel("half-running averages")
    residual = left[-1] / right[-1] - 1
    ratio = rf"$\overline{{O}}_L/\overline{{O}}_R - 1$ = {100 * residual:+.2f} % at the end"
    sides.legend(loc="lower right", title=ratio, title_fontsize=7.5, ncols=2)
    sides.set_ylim(bottom=float(np.nanmin(right)) / 10)  # room for the legend
    _plain_ticks(loss)
    return figure


def _sequence(result: Result) -> Figure:
    figure, (axes,) = _figure((3.0,))
    treads = result.treads()
    colours = _shades(len(treads))
    for tread, colour in zip(treads, colours, strict=True):
        axes.plot(tread.time, _positive(tread.column("left")[:, 0]), color=colour, lw=1.1)
        light = (*_lighten(colour), 1.0)
        axes.plot(tread.time, tread.column("right")[:, 0], color=light, lw=1.4, ls=(0, (1, 1)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Where O_L is about to change its sign it falls out of a logarithmic axis.
    axes.set_ylim(bottom=min(float(np.nanmin(t.column("right")[:, 0])) for t in treads) / 2)
    axes.set_xlabel(r"epochs since $\eta$ was set")
    axes.set_ylabel(r"half-running averages of $O_L$, $O_R$")
    rates = [
        Line2D([], [], color=colour, label=f"{tread.lr:g}")
        for tread, colour in zip(treads, colours, strict=True)
    ]
    kinds = [
        Line2D([], [], color="0.2", label=r"$\overline{O}_L$"),
        Line2D([], [], color="0.6", ls=(0, (1, 1)), lw=1.4, label=r"$\overline{O}_R$"),
    ]
    axes.add_artist(axes.legend(handles=kinds, loc="lower left", ncols=2))
    figure.legend(
        handles=rates, title=r"$\eta$", loc="outside right center", handlelength=1.0, fontsize=7
    )
    return figure


def _landscape(result: Result) -> Figure:
    figure, (axes,) = _figure((3.0,))
    treads = [tread for tread in result.treads() if tread.finished]
    axes.set_xlabel(r"learning rate $\eta$")
    axes.set_ylabel(r"$\langle O_{FB}\rangle$")
    if not treads:
        axes.text(0.5, 0.5, "no learning rate is finished yet", ha="center", color="0.4")
        return figure
    lrs = np.array([tread.lr for tread in treads])
    estimates = [statistics.estimate(tread.last("landscape")) for tread in treads]
    mean = np.array([estimate.mean for estimate in estimates])
    error = np.array([estimate.half_width for estimate in estimates])
    _against_line(axes, lrs, mean, error)
    axes.set_xlim(0, 1.06 * lrs.max())
    axes.set_ylim(0, 1.12 * np.nanmax(mean + np.nan_to_num(error)))
    figure.legend(loc="outside lower center", ncols=2)
    small = lrs <= _zoom(lrs)
    if 2 <= small.sum() < len(lrs):
        # Above, unless points or line stand there.
        _, right = axes.get_xlim()
        _, top = axes.get_ylim()
        heights = np.maximum(mean + np.nan_to_num(error), mean[np.argmin(lrs)] / lrs.min() * lrs)
        above = bool((heights[lrs < 0.6 * right] < 0.5 * top).all())
        inset = axes.inset_axes((0.14, 0.55, 0.42, 0.4) if above else (0.47, 0.13, 0.38, 0.38))
        _against_line(inset, lrs, mean, error)
        inset.set_xlim(0, 1.15 * lrs[small].max())
        inset.set_ylim(0, 1.25 * np.nanmax((mean + np.nan_to_num(error))[small]))
        inset.tick_params(labelsize=6)
        inset.locator_params(nbins=4)
        inset.xaxis.get_offset_text().set_fontsize(6)
        inset.yaxis.get_offset_text().set_fontsize(6)
        inset.ticklabel_format(axis="both", style="sci", scilimits=(-2, 2))
    return figure


def _against_line(axes: Axes, lrs: Array, mean: Array, error: Array) -> None:
    """Dots with intervals, and the line from the origin through the smallest learning rate."""
    seeds = np.isfinite(error).all()
    axes.errorbar(
        lrs,
        mean,
        yerr=error if seeds else None,
        fmt="o",
        ms=3.5,
        color="#222222",
        elinewidth=0.9,
        capsize=2,
        label="mean, 95 % interval" if seeds else "one seed",
        zorder=3,
    )
    slope = mean[np.argmin(lrs)] / lrs.min()
    far = 2 * lrs.max()
    axes.plot([0, far], [0, slope * far], color="#d62728", lw=1, label="through smallest $\\eta$")


def _zoom(lrs: Array) -> float:
    """Up to where the inset shows: five times the smallest, or the third smallest."""
    ordered = np.sort(lrs)
    return max(5 * ordered[0], ordered[min(2, len(ordered) - 1)])


def _schedules(
    results: Sequence[Result], arms: Sequence[str], seed: int, *, rate: bool = True
) -> Figure:
    figure, axes = _figure((0.9, 1.2, 1.5) if rate else (1.3, 1.7))
    loss, accuracy = axes[-2:]
    for result in results:
        for arm in result.run.arms:
            if arm not in arms:
                continue
            index = min(seed, len(result.run.seeds) - 1)
            colour, label = _ARMS[arm]
            style: dict[str, Any] = {"color": colour, "lw": 2.0 if arm == "adam" else 1.0}
            epoch, values = result.measured("train_loss", arm)
            loss.plot(epoch, values[:, index], label=label, **style)
            for name, dashes in (("train_accuracy", "-"), ("test_accuracy", _TEST)):
                epoch, values = result.measured(name, arm)
                accuracy.plot(epoch, values[:, index], ls=dashes, **style)
            if rate:
                epoch, values = result.measured("lr", arm)
                starts = np.concatenate([[0.0], epoch[:-1]])
                axes[0].step(
                    np.append(starts, epoch[-1]),
                    np.append(values[:, index], values[-1, index]),
                    where="post",
                    **style,
                )
    loss.set_yscale("log")
    loss.set_ylabel("training loss $f$")
    figure.legend(
        handles=[*loss.lines, *_KINDS],
        loc="outside lower center",
        ncols=2 if rate else 4,
        columnspacing=1.2,
        handlelength=1.5,
        fontsize=7,
    )
    _plain_ticks(loss)
    if rate:
        axes[0].set_yscale("log")
        axes[0].set_ylabel(r"$\eta$")
    _accuracy(accuracy)
    accuracy.set_xlabel("epochs")
    accuracy.set_xlim(0, None)
    return figure


def _accuracy(axes: Axes) -> None:
    """The upper part of the accuracies, where the schedules differ; the first epochs leave it."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    low = np.nanquantile(values, 0.04)
    axes.set_ylim(low - 0.06 * (np.nanmax(values) - low), None)
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    places = 0 if np.nanmax(values) - low > 0.04 else 1
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=places, symbol=" %"))


def _first(result: Result, name: str) -> Array:
    return result.column(name)[:, 0]


def _positive(values: Array) -> Array:
    """A gap where a logarithmic axis has no place for a value."""
    return np.where(values > 0, values, np.nan)


def _shades(count: int) -> list[tuple[float, float, float]]:
    palette = matplotlib.colormaps["viridis"](np.linspace(0.02, 0.88, max(count, 2)))
    return [(float(r), float(g), float(b)) for r, g, b, _ in palette[:count]]


def _lighten(colour: tuple[float, float, float]) -> tuple[float, ...]:
    return tuple(1 - 0.55 * (1 - channel) for channel in colour)


def _plain_ticks(axes: Axes) -> None:
    """A logarithmic axis of less than two decades, labelled in plain numbers."""
    low, high = axes.get_ylim()
    if high / low < 100:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
