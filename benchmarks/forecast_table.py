"""Forecasts of what `forecast.py` has recorded, beside their rivals, as tables and a figure.

    python benchmarks/forecast_table.py [--records DIR]

Each forecast is computed from what the record holds of the steps before the branch: mini-batch
losses, and losses at averaged weights (half-life 5 % of the steps so far) every 50 steps. The runs
that the forecast was tuned on are named in `TUNED`; the tables and the figure show the others.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tables import replace_table

from equilibrate.forecast.outcome import KEPT, History, Outcomes, Samples, outcomes

ROOT = Path(__file__).parents[1]
RECORDS = Path(__file__).parent / "results" / "forecast"
FIGURE, PAGE = ROOT / "docs" / "figures" / "forecast.png", ROOT / "docs" / "forecast.md"
TITLES = {
    "gpt2": "GPT-2 124M, AdamW",
    "transformer": "byte transformer, AdamW",
    "vit": "vision transformer, AdamW",
    "mlp": "MLP, SGD",
    "batchnorm": "ResNet, BatchNorm, SGD",
    "groupnorm": "ResNet, GroupNorm, SGD",
}
TUNED = {f"{task}-0" for task in TITLES}
NOTHING = Samples(np.zeros(0), np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Branch:
    """One cooldown: what was forecast, what happened, and what rivals say. Gains are in nats."""

    run: str
    task: str
    step: int
    horizon: int
    gain: float
    margin: float
    over: float
    over_margin: float
    realised: float
    """Loss before, less the loss after the cooldown."""
    realised_over: float
    """Loss after staying, less the loss after the cooldown; nan if it was not recorded."""
    averaged: float
    """Rival: the loss now, less that of averaged weights."""
    power_law: float
    """Rival: the fall of a power law through all losses so far."""


def history(record: dict[str, Any], step: int) -> History:
    """Return what a forecaster would know at a step."""
    first = step // 2
    losses = np.array(record["losses"][first:step])
    checks = np.array([row for row in record["checks"] if row[0] <= step])
    share = record["ages"][-1] / math.log(2)
    ages = share / (1 + share) * checks[:, 0]
    products = np.array([row for row in record["products"] if row[0] < step])
    return History(
        step,
        np.arange(first, step) + 0.5,
        losses,
        np.ones(len(losses)),
        Samples(products[:, 0], products[:, 2], products[:, 1]) if len(products) else NOTHING,
        Samples(checks[:, 0], checks[:, 1] - checks[:, -1], ages),
    )


def power_law(losses: np.ndarray, ahead: float) -> float:
    """Return by how much a + b·t^−p through all losses, but for the first tenth, falls."""
    t = np.arange(len(losses)) + 0.5
    kept = t > len(losses) / 10
    best = (math.inf, 0.0)
    for p in np.linspace(0.05, 2, 40):
        a = np.stack([np.ones(kept.sum()), t[kept] ** -p], axis=1)
        fitted, residual, *_ = np.linalg.lstsq(a, losses[kept], rcond=None)
        fall = fitted[1] * (len(losses) ** -p - (len(losses) + ahead) ** -p)
        best = min(best, (float(residual[0]), float(fall)))
    return best[1]


def branches(run: str, record: dict[str, Any]) -> Iterator[Branch]:
    """Yield the cooldowns of a run that begin after the first eighth of its trunk."""
    for made in record["branches"]:
        step, n = made["step"], made["horizon"]
        past = history(record, step)
        found = outcomes(past, n)
        if made["kind"] != "cooldown" or step < len(record["losses"]) / 8:
            continue
        if not isinstance(found, Outcomes):
            raise SystemExit(f"{run} at step {step}: {found}")
        around = record["evaluations"][f"{step} {n}"]
        now, end = float(np.mean(around["now"])), made["loss"]
        staying = float(np.mean(around["staying"])) if len(around["staying"]) == 7 else math.nan
        gain, over = found.gain(KEPT, 1), found.gain(KEPT, 1, than=(1, 0))
        yield Branch(
            run,
            record["task"],
            step,
            n,
            gain.value,
            gain.margin,
            over.value,
            over.margin,
            now - end,
            staying - end,
            float(past.differences.values[-8:].mean()),
            power_law(np.array(record["losses"][:step]), n),
        )


def summary(found: list[Branch]) -> str:
    """Return how far forecasts and rivals are from what happened, by task."""
    lines = [
        "| | branches | realised/forecast gain: median, 10 % to 90 % | within 10 %; 20 % | "
        "95 % intervals cover | half-width of these/gain | error, nats: forecast; averaged "
        "weights; power law | error of the gain over staying, nats |",
        "|" + " --- |" * 8,
    ]
    for title, chosen in [
        *((title, [b for b in found if b.task == task]) for task, title in TITLES.items()),
        ("all", found),
    ]:
        if chosen:
            ratios = np.array([b.realised / b.gain for b in chosen])
            low, middle, high = np.percentile(ratios, [10, 50, 90])
            off = np.abs(ratios - 1)
            cover = np.mean([abs(b.realised - b.gain) < b.margin for b in chosen])
            width = np.median([b.margin / b.gain for b in chosen])
            errors = [
                np.mean([abs(b.realised - getattr(b, name)) for b in chosen])
                for name in ("gain", "averaged", "power_law")
            ]
            over = np.nanmean([abs(b.realised_over - b.over) for b in chosen])
            lines.append(
                f"| {title} | {len(chosen)} | {middle:.2f}, {low:.2f} to {high:.2f} | "
                f"{np.mean(off < 0.1):.0%}; {np.mean(off < 0.2):.0%} | {cover:.0%} | "
                f"{width:.0%} | {'; '.join(f'{error:.3f}' for error in errors)} | {over:.3f} |"
            )
    return "\n".join(lines)


def table(found: list[Branch]) -> str:
    """Return all branches as a table."""
    lines = [
        "| run | step | cooldown | forecast gain | realised | forecast over staying | realised |",
        "|" + " --- |" * 7,
    ]
    for b in sorted(found, key=lambda b: (list(TITLES).index(b.task), b.run, b.step, b.horizon)):
        over = "not recorded" if math.isnan(b.realised_over) else f"{b.realised_over:.3f}"
        lines.append(
            f"| {b.run} | {b.step} | {b.horizon} | {b.gain:.3f} ± {b.margin:.3f} | "
            f"{b.realised:.3f} | {b.over:.3f} ± {b.over_margin:.3f} | {over} |"
        )
    return "\n".join(lines)


def draw(found: list[Branch], path: Path) -> None:
    """Draw realised gains against forecasts and against two rivals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [
        ("gain", "forecast"),
        ("averaged", "gain at averaged weights"),
        ("power_law", "power law through the losses"),
    ]
    low, high = 0.01, 1.2 * max(max(b.gain, b.realised) for b in found)
    for axes, (name, label) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        for i, (task, title) in enumerate(TITLES.items()):
            chosen = [b for b in found if b.task == task]
            x = np.clip([getattr(b, name) for b in chosen], low, None)
            axes.errorbar(
                x, [b.realised for b in chosen],
                xerr=[b.margin for b in chosen] if name == "gain" else None,
                fmt="*" if task == "gpt2" else "o", markersize=9 if task == "gpt2" else 4,
                linewidth=0.7, alpha=0.85, color=f"C{i}", label=title if chosen else None,
            )  # fmt: skip
        axes.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
        axes.set(xlabel=f"{label} (nats)", xscale="log", yscale="log")
        axes.set(xlim=(low, high), ylim=(low, high))
        ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_ticks([], minor=True)
    figure.axes[0].set_ylabel("gained by the cooldown (nats)")
    figure.axes[0].legend(frameon=False, fontsize=7, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    """Put the tables into the page and draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    records = {path.stem: json.loads(path.read_text()) for path in options.records.glob("*.json")}
    made = {run: list(branches(run, record)) for run, record in sorted(records.items())}
    found = [b for run, chosen in made.items() if run not in TUNED for b in chosen]
    tuned = [b for run, chosen in made.items() if run in TUNED for b in chosen]
    if not found:
        raise SystemExit(f"{options.records} holds no branch to report")
    draw(found, FIGURE)
    page = PAGE.read_text()
    parts = {"forecast": summary(found), "forecast tuned": summary(tuned), "branches": table(found)}
    for name, text in parts.items():
        print(text, end="\n\n")
        page = replace_table(page, name, text)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
