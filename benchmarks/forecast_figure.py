"""Table and calibration figure of what `forecast.py` has recorded."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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


def read(out: Path) -> list[Point]:
    """Return all points of all runs."""
    records = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    return [point for record in records for point in points(record)]


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


def draw(found: list[Point], path: Path) -> None:
    """Draw what was gained over staying against forecasts and averaged weights."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 4), sharex=True, sharey=True)
    panels = [
        ("forecast", "over_staying", "forecast", "gained over staying"),
        ("averaged", "over_staying", "gain at averaged weights (a forward pass)", ""),
        ("forecast", "total", "forecast + what staying gained", "gained in all"),
    ]
    top = 1.15 * max(max(p.total, p.forecast + p.staying) for p in found)
    for axis, (x, y, xlabel, ylabel) in zip(axes, panels, strict=True):
        axis.plot([0, top], [0, top], color="0.6", lw=1, zorder=0)
        for i, (model, title) in enumerate(TITLES.items()):
            for horizon, marker in ((150, "o"), (400, "s")):
                chosen = [p for p in found if (p.model, p.horizon) == (model, horizon)]
                extra = [p.staying if y == "total" else 0.0 for p in chosen]
                axis.errorbar(
                    [getattr(p, x) + e for p, e in zip(chosen, extra, strict=True)],
                    [getattr(p, y) for p in chosen],
                    xerr=[p.margin for p in chosen] if x == "forecast" else None,
                    fmt=marker, ms=4, lw=0.8, alpha=0.8, color=f"C{i}",
                    label=f"{title}" if horizon == 150 else None,
                    mfc="none" if horizon == 400 else None,
                )  # fmt: skip
        axis.set(xlabel=xlabel, ylabel=ylabel or axis.get_ylabel())
    axes[0].set(xlim=(0, top), ylim=(0, top))
    axes[1].set_ylabel("gained over staying")
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(
        "Linear cooldowns over 150 (filled) and 400 steps (open), training loss", size=10
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(out: Path) -> None:
    """Print the tables, put them into the page if it has a place for them, and draw the figure."""
    found = read(out)
    if not found:
        raise SystemExit(f"{out} holds no finished branch")
    draw(found, FIGURE)
    tables = {"forecast summary": summary(found), "forecast": table(found)}
    page = PAGE.read_text()
    for name, text in tables.items():
        print(text, end="\n\n")
        place = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(place, lambda m, text=text: f"{m[1]}{text}\n{m[2]}", page, flags=re.S)
    PAGE.write_text(page)
    print(f"written to {FIGURE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
