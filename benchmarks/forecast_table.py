"""Forecasts of what `forecast.py` has recorded, beside their rivals, as tables and a figure.

    python benchmarks/forecast_table.py [--records DIR]

Each forecast is computed from what the record holds of the steps before the branch: mini-batch
losses, and losses at averaged weights (half-life 5 % of the steps so far) every 50 steps. The runs
that the forecast was tuned on are named in `TUNED`; the tables and the figure show the others.
"""

import argparse
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from forecast import PLACES
from tables import replace_table

from equilibrate.forecast.outcome import KEPT, History, Outcomes, Samples, outcomes, shares
from equilibrate.schedulers.cooldown import judge

ROOT = Path(__file__).parents[1]
RECORDS = Path(__file__).parent / "results" / "forecast"
FIGURE, PAGE = ROOT / "docs" / "figures" / "forecast.png", ROOT / "docs" / "forecast.md"
TITLES = {
    "gpt2": "GPT-2 124M, AdamW",
    "transformer": "small transformer, AdamW",
    "vit": "vision transformer, AdamW",
    "mlp": "MLP, SGD",
    "batchnorm": "ResNet, BatchNorm, SGD",
    "groupnorm": "ResNet, GroupNorm, SGD",
}
TUNED = {f"{task}-10" for task in TITLES}
LONG = 0.5
"""Branches that are as long as this share of the steps before them have a row of their own."""
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
    annealing: float
    """Rival: what an annealing law says that was fitted to another run of the task."""
    gradients: float
    """Rival of `over`: E_h, half the mean of (θ − m)·g."""


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
        Samples(checks[:, 0], checks[:, 1] - checks[:, -1], ages, checks[:, 1]),
    )


def evaluated(record: dict[str, Any], step: int, end: int) -> float:
    """Return the loss around a step, on batches after another; nan if it was not recorded."""
    found = record["evaluations"].get(f"{step} {end}", [])
    return float(np.mean(found)) if len(found) == PLACES else math.nan


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


@dataclass(frozen=True)
class AnnealingLaw:
    """L = L₀ + A S₁^−α − C S₂ (arXiv 2408.11029), with S₁ the sum of all learning rates.

    S₂ is the sum of what the learning rate was lowered by, each with a momentum λ.
    """

    momentum: float
    power: float
    weights: np.ndarray

    def terms(self, lr: float, step: np.ndarray, horizon: np.ndarray) -> np.ndarray:
        """Return 1, S₁^−α and −S₂ after some constant steps and a linear cooldown."""
        kept = 1 / (1 - self.momentum)
        lowered = lr * kept * (1 - kept * (1 - self.momentum**horizon) / np.maximum(horizon, 1))
        area = lr * (step + horizon / 2)
        return np.stack([np.ones(len(step)), area**-self.power, -lowered * (horizon > 0)], axis=1)

    def gain(self, lr: float, step: int, horizon: int) -> float:
        """Return the fall of the loss in a cooldown."""
        now, end = (self.terms(lr, np.array([step]), np.array([n])) for n in (0, horizon))
        return ((now - end) @ self.weights).item()


def annealing_law(record: dict[str, Any]) -> AnnealingLaw:
    """Fit the law to a trunk and the ends of its cooldowns, which together weigh as much."""
    losses, lr = np.array(record["losses"]), record["settings"]["lr"]
    steps = np.arange(len(losses) // 12, len(losses), len(losses) // 50)
    width = len(losses) // 100
    smooth = np.array([losses[step - width : step + width].mean() for step in steps])
    made = [b for b in record["branches"] if b["kind"] == "cooldown"]
    pairs = [(b, evaluated(record, b["step"], b["step"] + b["horizon"]) - b["loss"]) for b in made]
    ends, gains = zip(*[(b, gain) for b, gain in pairs if not math.isnan(gain)], strict=True)
    begun = np.array([b["step"] for b in ends])
    starts = np.interp(begun, steps, smooth)
    step = np.concatenate([steps, begun])
    horizon = np.concatenate([0 * steps, [b["horizon"] for b in ends]])
    target = np.concatenate([smooth, starts - gains])
    root = np.sqrt([1.0] * len(steps) + [len(steps) / len(ends)] * len(ends))
    best = (math.inf, AnnealingLaw(0.99, 0.5, np.zeros(3)))
    for momentum in (0.9, 0.98, 0.99, 0.995, 0.998, 0.999):
        for power in np.linspace(0.1, 2, 39).tolist():
            law = AnnealingLaw(momentum, power, np.zeros(3))
            a = law.terms(lr, step, horizon) * root[:, None]
            fitted, *_ = np.linalg.lstsq(a, target * root, rcond=None)
            square = float(((a @ fitted - target * root) ** 2).sum())
            if square < best[0]:
                best = square, AnnealingLaw(momentum, power, fitted)
    return best[1]


def gradients_alone(record: dict[str, Any], step: int) -> float:
    """Return E_h from the later half of the steps before a branch; nan if it was not recorded."""
    products = [row[2] for row in record["products"] if step / 2 < row[0] < step]
    return float(np.mean(products)) / 2 if products else math.nan


def branches(
    run: str, record: dict[str, Any], law: AnnealingLaw | None = None, *, closure: bool = True
) -> Iterator[Branch]:
    """Yield the cooldowns of a run that begin after the first eighth of its trunk.

    A branch is left out if its run was stopped before the losses around its beginning were known
    or, without a closure, before its samples of gradients were written.
    """
    for made in record["branches"]:
        step, n, end = made["step"], made["horizon"], made["loss"]
        now, staying = (evaluated(record, at, step + n) for at in (step, step + n))
        if made["kind"] != "cooldown" or step < record["steps"] / 8 or math.isnan(now):
            continue
        past = history(record, step)
        if not closure and not len(past.products.steps):
            continue
        found = outcomes(past if closure else replace(past, differences=NOTHING), n)
        if not isinstance(found, Outcomes):
            raise SystemExit(f"{run} at step {step}: {found}")
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
            law.gain(record["settings"]["lr"], step, n) if law else math.nan,
            gradients_alone(record, step),
        )


def summary(found: list[Branch], without: Sequence[Branch] = ()) -> str:
    """Return how far forecasts and rivals are from what happened, by task.

    Args:
        found: The branches.
        without: Those of which there are forecasts without a closure, too.
    """
    lines = [
        "| | branches | realised/forecast gain: median, 10 % to 90 % | within 10 %; 20 % | "
        "95 % intervals cover | half-width of these/gain | error, nats: forecast; averaged "
        "weights; power law; annealing law | the same of the gain over staying: forecast; E_h |",
        "|" + " --- |" * 8,
    ]
    short = [b for b in found if b.horizon < LONG * b.step]
    for title, chosen in [
        *((title, [b for b in short if b.task == task]) for task, title in TITLES.items()),
        ("all", short),
        ("all, without a closure", [b for b in without if b.horizon < LONG * b.step]),
        ("longer ones", [b for b in found if b.horizon >= LONG * b.step]),
    ]:
        if chosen:
            ratios = np.array([b.realised / b.gain for b in chosen])
            low, middle, high = np.percentile(ratios, [10, 50, 90])
            off = np.abs(ratios - 1)
            cover = np.mean([abs(b.realised - b.gain) < b.margin for b in chosen])
            width = np.median([b.margin / b.gain for b in chosen])
            errors = [
                _mean_error([b.realised - getattr(b, name) for b in chosen])
                for name in ("gain", "averaged", "power_law", "annealing")
            ]
            overs = [
                _mean_error([b.realised_over - getattr(b, name) for b in chosen])
                for name in ("over", "gradients")
            ]
            lines.append(
                f"| {title} | {len(chosen)} | {middle:.2f}, {low:.2f} to {high:.2f} | "
                f"{np.mean(off < 0.1):.0%}; {np.mean(off < 0.2):.0%} | {cover:.0%} | "
                f"{width:.0%} | {'; '.join(errors)} | {'; '.join(overs)} |"
            )
    return "\n".join(lines)


def _mean_error(errors: list[float]) -> str:
    known = [abs(error) for error in errors if not math.isnan(error)]
    return f"{np.mean(known):.3f}" if known else "–"


CHANGES = {
    "half": ("half the learning rate", shares(0.5, 1)),
    "tenth": ("a tenth of it", shares(0.1, 1)),
    "batch": ("twice the batch", shares(1, 2)),
}


def what_if(records: dict[str, dict[str, Any]]) -> str:
    """Return how other learning rates and batches came out, as a table."""
    lines = [
        "| what if | branches | realised/forecast gain: median, 10 % to 90 % | "
        "95 % intervals cover |",
        "|" + " --- |" * 4,
    ]
    for kind, (title, (kept, removed)) in CHANGES.items():
        ratios, covered = [], []
        for record in records.values():
            for made in (b for b in record["branches"] if b["kind"] == kind):
                step, n = made["step"], made["horizon"]
                found = outcomes(history(record, step), n)
                assert isinstance(found, Outcomes)
                gain = found.gain(kept, removed)
                realised = evaluated(record, step, step + n) - made["loss"]
                ratios.append(realised / gain.value)
                covered.append(gain.covers(realised))
        if ratios:
            low, middle, high = np.percentile(ratios, [10, 50, 90])
            cells = f"{middle:.2f}, {low:.2f} to {high:.2f} | {np.mean(covered):.0%}"
            lines.append(f"| {title} | {len(ratios)} | {cells} |")
    return "\n".join(lines)


def ordering(records: dict[str, dict[str, Any]]) -> str:
    """Return how many pairs of runs of a task are ordered as their cooled-down losses, as a table.

    Pairs are runs of one seed with another learning rate or batch size.
    """
    lines = ["| task, step | pairs | forecast | loss | averaged weights |", "|" + " --- |" * 5]
    for task in TITLES:
        runs = [
            r
            for name, r in records.items()
            if r["task"] == task and re.match(rf"{task}-11(-|$)|gpt2-12", name)
        ]
        cooldowns = [b for r in runs for b in r["branches"] if b["kind"] == "cooldown"]
        for step in sorted({b["step"] for b in cooldowns}):
            right, pairs = np.zeros(3, dtype=int), 0
            for horizon in sorted({b["horizon"] for b in cooldowns if b["step"] == step}):
                ends = [end for r in runs if (end := _ends(r, step, horizon))]
                for one, other in itertools.combinations(ends, 2):
                    pairs += 1
                    for i in range(3):
                        right[i] += (one[0] < other[0]) == (one[i + 1] < other[i + 1])
            if pairs:
                cells = " | ".join(map(str, right))
                lines.append(f"| {TITLES[task]}, {step:,} | {pairs} | {cells} |")
    return "\n".join(lines)


def _ends(record: dict[str, Any], step: int, horizon: int) -> tuple[float, ...] | None:
    """Return the loss after a cooldown, its forecast, the loss before, and that of the average."""
    wanted = {"step": step, "kind": "cooldown", "horizon": horizon}
    ends = [made["loss"] for made in record["branches"] if wanted.items() <= made.items()]
    if not ends:
        return None
    past = history(record, step)
    found = outcomes(past, horizon)
    assert isinstance(found, Outcomes), found
    loss = float(np.mean(record["losses"][step - 100 : step]))
    averaged = loss - float(past.differences.values[-8:].mean())
    return ends[0], found.loss(KEPT, 1).value, loss, averaged


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


def _law_of_another(run: str, records: dict[str, dict[str, Any]]) -> AnnealingLaw | None:
    """Return the annealing law of another run of the task, a finished one if there is."""
    task = run.split("-")[0]
    others = [name for name in sorted(records) if name.split("-")[0] == task and name != run]
    others.sort(key=lambda name: not records[name].get("finished"))
    return annealing_law(records[others[0]]) if others else None


def chosen_share(record: dict[str, Any]) -> float:
    """Return the share of the steps that `Cooldown` would decay over."""
    total = record["steps"]
    for step in sorted({*range(100, total, 100), round(0.8 * total), round(0.9 * total)}):
        left = total - step
        if judge(outcomes(history(record, step), left), left, left / total)[0]:
            return left / total
    raise AssertionError("it begins at the last when a tenth is left")


def beginnings(records: dict[str, dict[str, Any]]) -> str:
    """Return where trainings end that begin their decay at several shares, as a table."""
    shares = (0.5, 0.3, 0.2, 0.1)
    kinds = ("averaged", "cosine", "cosine to a tenth")
    lines = [
        "| run | "
        + " | ".join(f"last {share:g}" for share in shares)
        + " | `Cooldown` (its share) | averaged weights | cosine | cosine to a tenth |",
        "|" + " --- |" * 9,
    ]
    for name, record in records.items():
        total = record["steps"]
        ends = {
            made["horizon"] / total: made["loss"]
            for made in record["branches"]
            if made["step"] + made["horizon"] == total and made["kind"] == "cooldown"
        }
        if set(shares) <= set(ends):
            share = chosen_share(record)
            end = np.interp(share, sorted(ends), [ends[u] for u in sorted(ends)])
            cells = [f"{ends[u]:.4f}" for u in shares] + [f"{end:.4f} ({share:.2g})"]
            others = [record["schedules"].get(kind) for kind in kinds]
            cells += ["–" if loss is None else f"{loss:.4f}" for loss in others]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Put the tables into the page and draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    paths = sorted(options.records.glob("*.json"))
    records = {path.stem: json.loads(path.read_text()) for path in paths}
    made = {
        run: list(branches(run, record, _law_of_another(run, records)))
        for run, record in sorted(records.items())
    }
    found = [b for run, chosen in made.items() if run not in TUNED for b in chosen]
    tuned = [b for run, chosen in made.items() if run in TUNED for b in chosen]
    without = [
        b
        for run, record in records.items()
        if run not in TUNED
        for b in branches(run, record, _law_of_another(run, records), closure=False)
    ]
    if not found:
        raise SystemExit(f"{options.records} holds no branch to report")
    draw(found, FIGURE)
    page = PAGE.read_text()
    reported = {run: record for run, record in records.items() if run not in TUNED}
    parts = {
        "forecast": summary(found, without),
        "what if": what_if(reported),
        "ordering": ordering(reported),
        "forecast tuned": summary(tuned),
        "beginnings": beginnings(reported),
        "branches": table(found),
    }
    for name, text in parts.items():
        print(text, end="\n\n")
        page = replace_table(page, name, text)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
