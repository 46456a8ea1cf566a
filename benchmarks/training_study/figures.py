"""Figures and the page of a study, from its records alone."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from training_study.design import ARMS, TASKS
from training_study.results import BUDGETS, REFERENCE, Results

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

SHOWN = (
    "constant", "cosine", "wsd", "plateau", "paper-0.1", "gain-known", "gain-start",
    "forecast-cooldown", "averaged", "schedule-free",
)  # fmt: skip
"""Arms whose curves are drawn."""


def draw_curves(results: Results, task: str, path: Path) -> None:
    """Draw the mean metric and learning rate of some arms against the steps."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    values = []
    for i, arm in enumerate(SHOWN):
        runs = results.runs(task, arm)
        if not runs:
            continue
        x = np.array(runs[0].steps) / runs[0].budget
        y = np.array([run.metrics for run in runs])
        values.append(y[:, len(x) // 6 :])
        color = f"C{i}" if i != 7 else "k"  # not grey
        top.plot(x, y.mean(0), color=color, lw=1.2, label=ARMS[arm].title.replace("`", ""))
        if len(runs) > 1:
            error = y.std(0, ddof=1) / np.sqrt(len(runs))
            top.fill_between(x, y.mean(0) - error, y.mean(0) + error, color=color, alpha=0.15, lw=0)
        rates = np.array([run.rates for run in runs])
        bottom.plot(x, np.exp(np.log(np.maximum(rates, 1e-9)).mean(0)), color=color, lw=1.2)
    low = min(y.min() for y in values)
    high = max(y.max() for y in values)
    top.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    for axes in (top, bottom):
        axes.axvline(1, color="0.7", lw=1, zorder=0)
        axes.grid(alpha=0.25)
    top.set(ylabel="held-out loss" if TASKS[task].is_text else "test accuracy")
    top.set_title(f"{TASKS[task].title}; mean and standard error over seeds", fontsize="medium")
    bottom.set(xlabel="steps, in budgets", ylabel="learning rate", yscale="log")
    bottom.set_ylim(bottom=max(bottom.get_ylim()[0], 1e-4 * bottom.get_ylim()[1]))
    top.legend(fontsize="x-small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_differences(
    results: Results, arms: Sequence[str], references: Mapping[float, str], path: Path
) -> None:
    """Draw paired differences to cosines with their 95 % intervals, a panel for each task.

    Args:
        results: What to draw.
        arms: The arms, from top to bottom.
        references: The cosine with which they are compared, by budgets.
        path: The file to write.
    """
    count = len(results.tasks)
    figure, grid = plt.subplots(
        1, count, figsize=(3.2 + 2.8 * count, 0.9 + (0.22 + 0.08 * len(references)) * len(arms)),
        sharey=True, layout="constrained", squeeze=False,
    )  # fmt: skip
    for axes, task in zip(grid[0], results.tasks, strict=True):
        factor = 1 if TASKS[task].is_text else 100
        for k, (budgets, reference) in enumerate(references.items()):
            rows = [
                (i, found.estimate)
                for i, arm in enumerate(arms)
                if (found := results.difference(task, arm, budgets, reference)) is not None
            ]
            axes.errorbar(
                [factor * estimate.value for _, estimate in rows],
                [i + 0.22 * (k - (len(references) - 1) / 2) for i, _ in rows],
                xerr=[factor * estimate.margin for _, estimate in rows],
                fmt="o", ms=3.5, color=f"C{k}", label=f"{budgets:g} budgets",
            )  # fmt: skip
        unit = "nats" if TASKS[task].is_text else "points of accuracy"
        axes.axvline(0, color="0.6", lw=1, zorder=0)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_title("\n".join(textwrap.wrap(TASKS[task].title, 28)), fontsize="small")
        axes.set_xlabel(f"better than cosine by, {unit}", fontsize="small")
        axes.grid(axis="x", alpha=0.25)
    grid[0, 0].set_yticks(range(len(arms)), [ARMS[arm].title.replace("`", "") for arm in arms])
    grid[0, 0].invert_yaxis()
    if len(references) > 1:
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize="x-small", ncols=3, loc="outside upper center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw(results: Results, folder: Path) -> None:
    """Draw all figures of the page into a folder."""
    for task in results.tasks:
        draw_curves(results, task, folder / f"training-{task}.png")
    arms = [arm for arm in ARMS if arm != REFERENCE and not ARMS[arm].as_tuned]
    draw_differences(results, arms, {1.0: REFERENCE}, folder / "training-differences.png")
    arms = [arm for arm in arms if not ARMS[arm].needs_budget]
    draw_differences(results, arms, BUDGETS, folder / "training-without-length.png")
