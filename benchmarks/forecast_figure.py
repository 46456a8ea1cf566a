"""Table and calibration figure of what `forecast.py` has recorded."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from equilibrate.gains import Forecast, Losses
from equilibrate.rules import Gain

from equilibrate import Reading
from equilibrate.estimates import Estimate

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


def acted(record: dict[str, Any], rule: Gain) -> int | None:
    """Return the step after which a rule would have lowered the rate of the trunk, if any."""
    rows = record["trunk"]
    for k, row in enumerate(rows, start=1):
        forecasts = tuple(
            Forecast(int(horizon), Estimate(value, stderr, dof=19), row["step"])
            for horizon, (value, stderr, _) in (
                (h, numbers) for h, numbers in row["forecasts"].items() if numbers
            )
            if not math.isnan(value)
        )
        losses = Losses(0, tuple(r["step"] for r in rows[:k]), tuple(r["loss"] for r in rows[:k]))
        reading = Reading(row["step"], 1, 1.0, 1.0, 0.1, forecasts=forecasts, losses=losses)
        if rule.judge(reading).act:
            return row["step"]
    return None


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
    ("forecast", "over_staying", "forecast", "gained over staying"),
    (
        "averaged",
        "over_staying",
        "gain at averaged weights (rival)",
        "gained over staying",
    ),
    ("forecast", "total", "forecast + what staying gained", "gained in all"),
]


def draw(found: list[Point], path: Path) -> None:
    """Draw what was gained over staying against forecasts and averaged weights, and in all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.1), layout="constrained")
    FigureCanvasAgg(figure)
    short, long = sorted({p.horizon for p in found})
    for axes, (x, y, xlabel, ylabel) in zip(figure.subplots(1, 3), PANELS, strict=True):
        top = 0.0
        for i, (model, title) in enumerate(TITLES.items()):
            for horizon, marker in ((short, "o"), (long, "s")):
                chosen = [p for p in found if (p.model, p.horizon) == (model, horizon)]
                values = [getattr(p, x) + (p.staying if y == "total" else 0.0) for p in chosen]
                gained = [getattr(p, y) for p in chosen]
                top = max([top, *values, *gained])
                axes.errorbar(
                    values, gained,
                    xerr=[p.margin for p in chosen] if x == "forecast" else None,
                    fmt=marker, markersize=4, linewidth=0.8, alpha=0.8, color=f"C{i}",
                    label=title if horizon == short and chosen else None,
                    markerfacecolor="none" if horizon == long else None,
                )  # fmt: skip
        axes.axline((0, 0), slope=1, color="0.6", linewidth=1, zorder=0)
        axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, 1.08 * top), ylim=(0, 1.08 * top))
        axes.set_aspect("equal")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(
        f"Decrease of the training loss: linear cooldowns over {short} (filled) and {long} steps",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(out: Path) -> None:
    """Print the tables, put them into the page if it has a place for them, and draw the figure."""
    records = read(out)
    found = [point for record in records for point in points(record)]
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
    for record in records:
        steps = [acted(record, rule) for rule in (Gain(), Gain(total_steps=6000))]
        name = f"{TITLES[record['model']]}, seed {record['seed']}"
        print(f"{name}: Gain() acts at step {steps[0]}, with total_steps=6000 at {steps[1]}")
    print(f"written to {FIGURE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
