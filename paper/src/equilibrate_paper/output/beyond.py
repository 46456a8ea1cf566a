"""Panels that are not in the paper: grids over X and Y, precisions, batches, relaxation times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter

from equilibrate.estimates import Estimate
from equilibrate_paper.analysis import measures, shuffling
from equilibrate_paper.analysis.results import Array, Result
from equilibrate_paper.analysis.seeds import mean_over_seeds
from equilibrate_paper.output import style

PAPER_SETTINGS = ((0.01, 0.1), (0.1, 0.3))
"""(X, Y) of the main text and of the appendix."""


def grid(results: Sequence[Result]) -> Figure:
    """Draw final test accuracies and epochs of arrival over X and Y.

    Args:
        results: The run over all X and Y.

    Returns:
        The figure.
    """
    figure, (final, epochs) = style.stacked((1.7, 1.7))
    found = measures.grid(results[0])
    error = measures.sampling_error(float(found.accuracy.mean()), results[0].run.task.data)
    _heat_map(final, found, 100 * found.accuracy, 2 if error < 0.0025 else 1, "Blues")
    final.set_title("final test accuracy (%)")
    _heat_map(epochs, found, found.arrival, 0, "Oranges")
    epochs.set_title("epochs until it stays there")
    epochs.set_xlabel("decrease $Y$")
    return figure


def _heat_map(axes: Axes, grid: measures.Grid, values: Array, places: int, colours: str) -> None:
    """A coloured cell with its number for each X and Y."""
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    depth = 0.05 + 0.5 * (values - low) / ((high - low) or 1)  # pale enough for black text
    axes.imshow(matplotlib.colormaps[colours](np.nan_to_num(depth)), origin="lower", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        text = f"{value:.{places}f}" if np.isfinite(value) else "never"
        axes.text(column, row, text, ha="center", va="center", fontsize=7.5)
    for x, y in PAPER_SETTINGS:
        corner = grid.decreases.index(y) - 0.46, grid.thresholds.index(x) - 0.46
        axes.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, ec="#222222", lw=1.5))
    axes.set_xticks(range(len(grid.decreases)), [f"{y:g}" for y in grid.decreases])
    axes.set_yticks(range(len(grid.thresholds)), [f"{x:g}" for x in grid.thresholds])
    axes.set_ylabel("threshold $X$")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def precision(results: Sequence[Result]) -> Figure:
    """Draw the residual of FDR1 and O_FB for each precision.

    Args:
        results: A run for each precision.

    Returns:
        The figure.
    """
    figure, (residual, landscape) = style.stacked((1.5, 1.5))
    for place, result in enumerate(results):
        for phase in measures.finished(result):
            _column(residual, place, 100 * measures.residual(phase))
            _column(landscape, place, phase.last("landscape"))
    residual.axhline(0, color="0.6", lw=0.6, zorder=0)
    residual.set_ylabel(r"$\overline{O}_L/\overline{O}_R - 1$ (%)")
    landscape.set_ylabel(r"$\langle O_{FB}\rangle$")
    landscape.set_xlim(-0.5, len(results) - 0.5)
    names = [measures.PRECISIONS[result.run.precision] for result in results]
    landscape.set_xticks(range(len(results)), names)
    landscape.set_xlabel(r"precision of products, $\eta$ = 0.02")
    return figure


def _column(axes: Axes, place: int, values: Array) -> None:
    """Each seed as a pale dot, and to the right their mean with its interval."""
    axes.plot(np.full(len(values), place - 0.1), values, "o", ms=2.5, color="#9db8d2", mew=0)
    found = mean_over_seeds(values)
    axes.errorbar(
        [place + 0.1],
        [found.value],
        yerr=None if np.isnan(found.margin) else [found.margin],
        fmt="o",
        ms=4,
        color="#0b5394",
        elinewidth=1,
        capsize=3,
    )


def comparison(results: Sequence[Result]) -> Figure:
    """Draw O_FB/η with reshuffled and independent batches, and their ratio.

    Args:
        results: The run with reshuffled batches and the one with independent batches.

    Returns:
        The figure, with the ratio by one curvature as a line if there is such a fit.
    """
    figure, (values, ratio) = style.stacked((1.8, 1.3))
    # Markers are moved apart a little, so that neither hides the other.
    looks = {
        "shuffled": ("reshuffled", "#222222", 1 / 1.03),
        "independent": ("independent", "none", 1.03),
    }
    found = []
    for result in results:
        lrs, landscape = measures.landscape(result)
        estimates = {
            float(lr): mean_over_seeds(row / lr) for lr, row in zip(lrs, landscape, strict=True)
        }
        found.append(estimates)
        name, fill, aside = looks[result.run.sampling]
        moved = {aside * lr: estimate for lr, estimate in estimates.items()}
        _points(values, moved, label=f"{name} batches", mfc=fill)
    values.set_ylabel(r"$\langle O_{FB}\rangle/\eta$")
    ratio.set_ylabel("ratio − 1 (%)")
    ratio.set_xlabel(r"learning rate $\eta$")
    first, second = found
    if not (first or second):
        values.text(0.5, 0.5, "no learning rate is finished yet", ha="center", color="0.4")
        return figure
    common = shuffling.ratios(*results)
    percent = {lr: each.shifted(-1).scaled(100) for lr, each in common.items()}
    _points(ratio, percent, mfc="#222222")
    ratio.axhline(0, color="0.6", lw=0.6, zorder=0)
    fit = shuffling.fit_runs(*results)
    if fit is not None:
        lrs = np.geomspace(min(common) / 1.08, max(common) * 1.08, 200)
        label = f"one curvature, $h$ = {fit.curvature:.1f}"
        ratio.plot(lrs, 100 * (fit.factor(lrs) - 1), color="#d62728", lw=1, label=label, zorder=1)
        ratio.legend(loc="lower right")
    values.legend(loc="best")
    ratio.set_xscale("log")
    wide = bool(common) and max(common) > 100 * min(common)
    subs = (1.0, 2.0, 5.0) if wide else (1.0, 2.0, 3.0, 5.0)
    ratio.xaxis.set_major_locator(LogLocator(subs=subs))
    ratio.xaxis.set_major_formatter("{x:g}")
    ratio.xaxis.set_minor_formatter(NullFormatter())
    ratio.tick_params(axis="x", labelrotation=45 if wide else 0)
    return figure


def _points(axes: Axes, estimates: Mapping[float, Estimate], mfc: str, label: str = "") -> None:
    """Draw estimates over η with their intervals."""
    margins = [estimate.margin for estimate in estimates.values()]
    axes.errorbar(
        [*estimates],
        [estimate.value for estimate in estimates.values()],
        yerr=margins if np.isfinite(margins).all() else None,
        fmt="o",
        ms=4,
        color="#222222",
        elinewidth=0.9,
        capsize=2,
        mfc=mfc,
        label=label,
    )


def times(results: Sequence[Result]) -> Figure:
    """Draw relaxation times against the learning rate, with the fitted power law.

    Args:
        results: The run with phases at several learning rates.

    Returns:
        The figure.
    """
    figure, (axes,) = style.stacked((3.0,))
    axes.set_xlabel(r"learning rate $\eta$")
    axes.set_ylabel("epochs to equilibrate")
    phases = measures.finished(results[0])
    if not phases:
        axes.text(0.5, 0.5, "no learning rate is finished yet", ha="center", color="0.4")
        return figure
    times = {phase.lr: measures.relaxation_times(phase) for phase in phases}
    relaxed = [lr for lr, values in times.items() if not np.isnan(values).any()]
    if relaxed:
        _times(axes, np.array(relaxed), [measures.geometric_mean(times[lr]) for lr in relaxed])
    longer = {phase.lr: phase.epochs for phase in phases if phase.lr not in relaxed}
    if longer:
        label = "longer, in some seeds"
        axes.plot([*longer], [*longer.values()], "^", mfc="none", color="#222222", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    fit = measures.relaxation_power(phases)
    if fit is not None:
        power = mean_over_seeds(fit[0])
        ends = np.array([min(times) / 1.15, max(times) * 1.15])
        line = np.exp(fit[1].mean()) * ends**power.value
        axes.plot(ends, line, color="#d62728", lw=1, label=rf"$\propto\eta^{{{_exponent(power)}}}$")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelrotation=45 if max(times) > 100 * min(times) else 0)
    axes.legend(loc="lower left")
    return figure


def _times(axes: Axes, lrs: Array, estimates: Sequence[tuple[float, float, float]]) -> None:
    mean, low, high = np.array(estimates).T
    seeds = np.isfinite(low).all()
    axes.errorbar(
        lrs,
        mean,
        yerr=np.stack([mean - low, high - mean]).tolist() if seeds else None,
        fmt="o",
        ms=4,
        color="#222222",
        elinewidth=0.9,
        capsize=2,
        label="mean, 95 % interval" if seeds else "one seed",
        zorder=3,
    )


def _exponent(power: Estimate) -> str:
    error = "" if np.isnan(power.margin) else rf"\,\pm\,{power.margin:.2f}"
    return f"{power.value:.2f}{error}"
