"""All panels, drawn from the records; the panels that are not in the paper are in `beyond`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from equilibrate.record import jsonl
from equilibrate_paper.analysis import measures
from equilibrate_paper.analysis.results import Array, Result
from equilibrate_paper.analysis.seeds import mean_over_seeds
from equilibrate_paper.output import beyond, initial, style
from equilibrate_paper.protocol.panels import PANELS

Results = Mapping[str, Result]

_BEYOND = {
    "B1": beyond.grid,
    "B2": beyond.precision,
    "B3": beyond.times,
    "B4": beyond.comparison,
}
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
    """Draw one panel.

    Args:
        panel: Name of the panel, "1a" to "B4b".
        results: Results by the names of their runs, with those of the panel.

    Returns:
        The figure.
    """
    own = [results[name] for name in PANELS[panel].runs]
    own += [results[name] for name in PANELS[panel].optional if name in results]
    kind = panel.rstrip("abcd")
    with matplotlib.rc_context(style.STYLE):
        if kind == "1":
            figure = initial.draw(own[0])
        elif kind == "2":
            figure = _sequence(own[0])
        elif kind == "3":
            figure = _landscape(own)
        elif kind == "4":
            figure = _schedules(own, ("preset", "adaptive", "amsgrad"), 0)
        elif kind == "S1":
            figure = _schedules(own[::-1], ("amsgrad", "adam"), 0, rate=False)
        elif kind == "S2":
            figure = _schedules(own, ("preset", "eager", "amsgrad"), "abcd".index(panel[-1]))
        else:
            figure = _BEYOND[kind](own)
        _head(figure, panel, own)
    return figure


def caption(panel: str, results: Results) -> str:
    """Compose the caption of a panel.

    Args:
        panel: Name of the panel.
        results: Results by the names of their runs, with those of the panel.

    Returns:
        The caption.
    """
    result = results[PANELS[panel].runs[0]]
    return PANELS[panel].caption.format(title=result.run.task.title, seed="abcd".index(panel[-1]))


def save(panel: str, results: Results, folder: Path | str) -> tuple[Path, Path]:
    """Draw one panel into files such as fig1a.png and fig1a.svg.

    The same records give the same files, byte for byte.

    Args:
        panel: Name of the panel.
        results: Results by the names of their runs, with those of the panel.
        folder: The folder to write to; it is created if necessary.

    Returns:
        The paths of the two files.
    """
    folder = Path(folder)
    figure = draw(panel, results)
    png, svg = folder / f"fig{panel}.png", folder / f"fig{panel}.svg"
    with matplotlib.rc_context(style.STYLE):
        _write(figure, png, dpi=200, metadata={"Software": None})
        _write(figure, svg, metadata={"Date": None})
    return png, svg


def _write(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure as `savefig` does, to a file that is complete or absent."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], **options)
    jsonl.write_file(path, content.getvalue())


def _head(figure: Figure, panel: str, results: Sequence[Result]) -> None:
    """Add the panel's name and title, and what is missing if a run is incomplete."""
    run = results[0].run
    title = run.task.title
    if panel[0] in "123" or panel[:2] in ("B2", "B3", "B4"):
        title += rf", $\mu$ = {run.momentum:g}"
    elif panel[0] == "4" or panel.startswith("B1"):
        title += r", $\mu$ = 0"
    elif panel.startswith("S2"):
        title += rf", $\mu$ = 0, seed {'abcd'.index(panel[-1])}"
    title = rf"$\bf{{{panel}}}$   {title}"
    if panel.startswith("B1"):
        figure.suptitle(title, x=0.02, ha="left", fontsize=8.5)
    else:
        figure.axes[0].set_title(title, loc="left")
    figure.align_ylabels()
    missing = dict.fromkeys(f"{r.run.name}: {s}" for r in results if (s := r.shortfall))
    if missing:  # above the axes, since a legend may cover the space below
        place = figure.supxlabel if panel.startswith("B1") else figure.suptitle
        place("incomplete – " + ";\n".join(missing), fontsize=6.5, color="#b00020")


def _sequence(result: Result) -> Figure:
    figure, (axes,) = style.stacked((3.0,))
    phases = result.phases()
    colours = style.shades(len(phases))
    for phase, colour in zip(phases, colours, strict=True):
        axes.plot(phase.time, style.positive(phase.column("left")[:, 0]), color=colour, lw=1.1)
        light = (*style.lighten(colour), 1.0)
        axes.plot(phase.time, phase.column("right")[:, 0], color=light, lw=1.4, ls=(0, (1, 1)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    # O_L leaves a logarithmic axis where it changes its sign.
    axes.set_ylim(bottom=min(float(np.nanmin(p.column("right")[:, 0])) for p in phases) / 2)
    axes.set_xlabel(r"epochs since $\eta$ was set")
    axes.set_ylabel(r"half-running averages of $O_L$, $O_R$")
    rates = [
        Line2D([], [], color=colour, label=f"{phase.lr:g}")
        for phase, colour in zip(phases, colours, strict=True)
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


@dataclass(frozen=True, eq=False)
class _Series:
    """O_FB for increasing learning rates, and how the batches were drawn."""

    lrs: Array
    mean: Array
    margin: Array
    sampling: str

    @property
    def low(self) -> Array:
        return self.mean - np.nan_to_num(self.margin)

    @property
    def high(self) -> Array:
        return self.mean + np.nan_to_num(self.margin)

    @property
    def slope(self) -> float:
        """Slope of the line from the origin through the point at the smallest learning rate."""
        return float(self.mean[0] / self.lrs[0])

    def plot(self, axes: Axes) -> None:
        seeds = np.isfinite(self.margin).all()
        name, marker, line = _BATCHES[self.sampling]
        axes.errorbar(
            self.lrs,
            self.mean,
            yerr=self.margin if seeds else None,
            elinewidth=0.9,
            capsize=2,
            label=f"{name}, {'95 % interval' if seeds else 'one seed'}",
            zorder=3,
            **marker,
        )
        far = 2 * float(self.lrs[-1])
        axes.plot([0, far], [0, self.slope * far], lw=1, **line)


_BATCHES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "shuffled": (
        "reshuffled batches",
        {"fmt": "o", "ms": 3.5, "color": "#222222"},
        {"color": "#d62728", "label": "through smallest $\\eta$"},
    ),
    "independent": (
        "independent batches",
        {"fmt": "D", "ms": 4.5, "color": "#1f77b4", "markerfacecolor": "none"},
        {"color": "#1f77b4", "ls": (0, (4, 2))},
    ),
}


def _series(result: Result) -> _Series | None:
    lrs, values = measures.landscape(result)
    if not len(lrs):
        return None
    estimates = [mean_over_seeds(row) for row in values]
    mean = np.array([estimate.value for estimate in estimates])
    margin = np.array([estimate.margin for estimate in estimates])
    return _Series(lrs, mean, margin, result.run.sampling)


def _landscape(results: Sequence[Result]) -> Figure:
    figure, (axes,) = style.stacked((3.0,))
    axes.set_xlabel(r"learning rate $\eta$")
    axes.set_ylabel(r"$\langle O_{FB}\rangle$")
    series = [found for result in results if (found := _series(result)) is not None]
    if not series:
        axes.text(0.5, 0.5, "no learning rate is finished yet", ha="center", color="0.4")
        return figure
    for one in series:
        one.plot(axes)
    largest = max(float(one.lrs[-1]) for one in series)
    _frame(axes, series, largest, 1.06)
    figure.legend(loc="outside lower center", ncols=1 if len(series) > 1 else 2)
    lrs = np.unique(np.concatenate([one.lrs for one in series]))
    small = lrs[lrs <= _zoom(lrs)]
    place = _place(axes, series)
    if place is not None and 2 <= len(small) < len(lrs):
        inset = axes.inset_axes(place)
        for one in series:
            one.plot(inset)
        _frame(inset, series, float(small[-1]), 1.15)
        inset.spines[:].set(visible=True, color="0.6")  # separates its axes from the points outside
        inset.tick_params(labelsize=6, color="0.6")
        inset.locator_params(nbins=4)
        inset.xaxis.get_offset_text().set_fontsize(6)
        inset.yaxis.get_offset_text().set_fontsize(6)
        inset.ticklabel_format(axis="both", style="sci", scilimits=(-2, 2))
    return figure


def _frame(axes: Axes, series: Sequence[_Series], largest: float, margin: float) -> None:
    """Set the limits so that zero and all points up to the learning rate `largest` are visible."""
    high = max(float(value) for one in series for value in one.high[one.lrs <= largest])
    low = min(float(value) for one in series for value in one.low[one.lrs <= largest])
    axes.set_xlim(0, margin * largest)
    room = (2 * margin - 1) * high
    if low < 0:  # with momentum and reshuffling, O_FB may be negative
        axes.set_ylim(low - 0.1 * (room - low), room)
        axes.axhline(0, color="0.6", lw=0.6, zorder=0)
    else:
        axes.set_ylim(0, room)


_Box = tuple[float, float, float, float]
_INSETS: tuple[_Box, ...] = ((0.14, 0.55, 0.42, 0.4), (0.49, 0.13, 0.31, 0.38))


def _place(axes: Axes, series: Sequence[_Series]) -> _Box | None:
    """Return a place for an inset that hides no point: top left, bottom right, or None."""
    return next((box for box in _INSETS if not any(_hides(box, axes, s) for s in series)), None)


def _hides(box: _Box, axes: Axes, one: _Series) -> bool:
    """Return whether an inset with its labels would hide points or their intervals."""
    (_, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    x, low, high = one.lrs / right, *((y - bottom) / (top - bottom) for y in (one.low, one.high))
    outside = (x < box[0] - 0.06) | (x > box[0] + box[2] + 0.03)
    return bool((~outside & (high > box[1] - 0.12) & (low < box[1] + box[3])).any())


def _zoom(lrs: Array) -> float:
    """Return the largest learning rate in the inset, which shows the smaller half of them."""
    return float(np.sort(lrs)[(len(lrs) - 1) // 2])


def _schedules(
    results: Sequence[Result], arms: Sequence[str], seed: int, *, rate: bool = True
) -> Figure:
    figure, axes = style.stacked((0.9, 1.2, 1.5) if rate else (1.3, 1.7))
    loss, accuracy = axes[-2:]
    for result in results:
        for arm in result.run.arms:
            if arm not in arms:
                continue
            index = min(seed, len(result.run.seeds) - 1)
            colour, label = _ARMS[arm]
            look: dict[str, Any] = {"color": colour, "lw": 2.0 if arm == "adam" else 1.0}
            epoch, values = result.measured("train_loss", arm)
            loss.plot(epoch, values[:, index], label=label, **look)
            for name, dashes in (("train_accuracy", "-"), ("test_accuracy", _TEST)):
                epoch, values = result.measured(name, arm)
                accuracy.plot(epoch, values[:, index], ls=dashes, **look)
            if rate:
                epoch, values = result.measured("lr", arm)
                starts = np.concatenate([[0.0], epoch[:-1]])
                axes[0].step(
                    np.append(starts, epoch[-1]),
                    np.append(values[:, index], values[-1, index]),
                    where="post",
                    **look,
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
    style.plain_ticks(loss)
    if rate:
        axes[0].set_yscale("log")
        axes[0].set_ylabel(r"$\eta$")
    _accuracy(accuracy)
    accuracy.set_xlabel("epochs")
    accuracy.set_xlim(0, None)
    return figure


def _accuracy(axes: Axes) -> None:
    """Limit the axis to high accuracies, where the schedules differ; early epochs lie outside."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    low = np.nanquantile(values, 0.04)
    axes.set_ylim(low - 0.06 * (np.nanmax(values) - low), None)
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    places = 0 if np.nanmax(values) - low > 0.04 else 1
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=places, symbol=" %"))
