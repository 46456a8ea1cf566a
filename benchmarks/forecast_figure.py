"""Table and calibration figure of what `forecast.py` has recorded."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tables import replace_table

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "figures" / "forecast.png"
PAGE = ROOT / "docs" / "forecast.md"
TITLES = {
    "mlp": "MLP",
    "batchnorm": "ResNet, BatchNorm",
    "groupnorm": "ResNet, GroupNorm",
    "transformer": "transformer, AdamW",
}


@dataclass(frozen=True)
class Point:
    """One branch and horizon: what was forecast and what was gained."""

    model: str
    seed: int
    step: int
    horizon: int
    forecast: float
    margin: float
    independent: float
    """The forecast if batches had been drawn independently."""
    over_staying: float
    """Loss after continuing at the constant rate, less the loss after the cooldown."""
    total: float
    """Loss before, less the loss after the cooldown."""
    staying: float
    """Loss before, less the loss after continuing."""
    tenth: float
    """Loss before, less the loss at a tenth of the rate, as many steps later."""
    averaged: float
    """Loss before, less the loss at averaged parameters."""


def points(record: dict[str, Any]) -> Iterator[Point]:
    """Yield the branches of a run."""
    for branch in record["branches"]:
        before = float(np.mean(branch["before_nearby"]))
        for horizon in map(str, record["horizons"]):
            value, _, margin = branch["forecasts"][horizon]
            yield Point(
                record["model"],
                record["seed"],
                branch["step"],
                int(horizon),
                value,
                margin,
                branch["independent"][horizon][0],
                branch["constant"][horizon] - branch["cooldown"][horizon],
                before - branch["cooldown"][horizon],
                before - branch["constant"][horizon],
                before - branch["tenth"][horizon],
                before - branch["averaged"][horizon],
            )


def read(out: Path) -> list[dict[str, Any]]:
    """Return the records of all runs."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def groups(found: list[Point]) -> Iterator[tuple[tuple[str, int, int], list[Point]]]:
    """Yield the points of all seeds of one model, step and horizon."""
    for model in TITLES:
        chosen = [p for p in found if p.model == model]
        for key in sorted({(p.step, p.horizon) for p in chosen}):
            yield (model, *key), [p for p in chosen if (p.step, p.horizon) == key]


def table(found: list[Point]) -> str:
    """Return means over seeds as a table of Markdown."""
    columns = ["forecast", "over_staying", "averaged", "total", "staying", "tenth"]
    heads = [
        "forecast",
        "gained over staying",
        "averaged weights",
        "gained in all",
        "staying gained",
        "a tenth of the rate gained",
    ]
    lines = [f"| | step | cooldown | {' | '.join(heads)} |", "|" + " --- |" * (3 + len(heads))]
    for (model, step, horizon), seeds in groups(found):
        cells = [f"{np.mean([getattr(p, c) for p in seeds]):.3f}" for c in columns]
        lines.append(f"| {TITLES[model]} | {step} | {horizon} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(found: list[Point]) -> str:
    """Return how far forecasts and averaged weights are from what was gained, by model."""
    lines = [
        "| | gained over staying / forecast | / averaged weights | forecast, independent batches |",
        "|" + " --- |" * 4,
    ]
    for model, title in TITLES.items():
        means = [seeds for key, seeds in groups(found) if key[0] == model]
        if means:
            cells = [
                _range(means, "over_staying", "forecast"),
                _range(means, "over_staying", "averaged"),
                _range(means, "independent", "forecast"),
            ]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(groups: list[list[Point]], top: str, bottom: str) -> str:
    """Return the mean of a ratio and its range over steps and horizons, of means over seeds."""
    ratios = [
        sum(getattr(p, top) for p in seeds) / sum(getattr(p, bottom) for p in seeds)
        for seeds in groups
    ]
    middle = math.exp(float(np.mean(np.log(ratios))))
    return f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


PANELS = [
    ("forecast", "forecast, without a forward pass"),
    ("averaged", "gain at averaged weights, with forward passes"),
]
"""What is compared with the gain of a cooldown over staying, and how it is called."""


def draw(found: list[Point], path: Path) -> None:
    """Draw what cooldowns gained over staying, against forecasts and averaged weights."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    short, long = sorted({p.horizon for p in found})
    top = 1.08 * max(max(p.forecast, p.averaged, p.over_staying) for p in found)
    for axes, (x, label) in zip(figure.subplots(1, 2, sharey=True), PANELS, strict=True):
        for i, (model, title) in enumerate(TITLES.items()):
            for horizon, marker in ((short, "o"), (long, "s")):
                chosen = [p for p in found if (p.model, p.horizon) == (model, horizon)]
                axes.errorbar(
                    [getattr(p, x) for p in chosen], [p.over_staying for p in chosen],
                    xerr=[p.margin for p in chosen] if x == "forecast" else None,
                    fmt=marker, markersize=4, linewidth=0.8, alpha=0.8, color=f"C{i}",
                    label=title if horizon == short and chosen else None,
                    markerfacecolor="none" if horizon == long else None,
                )  # fmt: skip
        axes.axline((0, 0), slope=1, color="0.6", linewidth=1, zorder=0)
        axes.set(xlabel=label, xlim=(0, top), ylim=(0, top))
        axes.set_aspect("equal")
    figure.axes[0].set_ylabel("gained by the cooldown, over staying")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(
        f"Training loss that cooldowns over {short} (filled) and {long} steps gained", fontsize=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(out: Path) -> None:
    """Print the tables, put them into the page, and draw the figure."""
    records = read(out)
    found = [point for record in records for point in points(record)]
    if not found:
        raise SystemExit(f"{out} holds no finished branch")
    draw(found, FIGURE)
    tables = {"forecast summary": summary(found), "forecast": table(found)}
    page = PAGE.read_text()
    for name, text in tables.items():
        print(text, end="\n\n")
        page = replace_table(page, name, text)
    PAGE.write_text(page)
    print(f"written to {FIGURE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
