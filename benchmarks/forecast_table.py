"""Forecasts of what `forecast.py` has recorded, beside their rivals, as tables and a figure.

    python benchmarks/forecast_table.py [--records DIR]

Each forecast is computed from what the record holds of the steps before the branch: mini-batch
losses, and losses at averaged weights (half-life 5 % of the steps so far) every 50 steps. The plan,
`forecast_plan.md`, says which runs the forecast was tuned on.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from forecast_ordering import ordering, pairs
from forecast_records import FAMILIES, NOTHING, TITLES, history, realised, setting
from forecast_rivals import AnnealingLaw, fit_law, multi_power, power_law, with_momentum
from forecast_schedules import beginnings, confirmation, regrets
from tables import replace_table

from equilibrate.forecast.outcome import KEPT, Outcomes, outcomes

ROOT = Path(__file__).parents[1]
RECORDS = Path(__file__).parent / "results" / "forecast"
FIGURE, PAGE = ROOT / "docs" / "figures" / "forecast.png", ROOT / "docs" / "forecast.md"
GROUPS = {
    "tuned": re.compile(r"(gpt2|transformer)-1[0-2]\b|\w+-31\b"),
    "faulty": re.compile(r"(gpt2|transformer|vit|batchnorm|groupnorm)-[2-5]\d\b"),
    "new": re.compile(r"\w+-[5-7]\d\b"),
    "seen": re.compile(""),
}
"""Runs that constants were chosen on; runs whose branches had the fault that the plan describes;
runs made when the method was fixed; and all others, which were looked at before. A run is in the
first that fits."""
EARLIER = {
    "seen": "Runs that had been looked at before the method was changed for the last time",
    "faulty": "Runs whose branches began with the momentum or the moments of the one before",
    "tuned": "Runs that constants were chosen on; those of larger networks have that fault, too",
}
LONG = 0.5
"""Branches that are as long as this share of the steps before them have a row of their own."""


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
    held_out: float
    """The realised gain on held-out examples."""
    averaged: float
    """Rival: the loss now, less that of averaged weights."""
    power_law: float
    """Rival: the fall of a power law through all losses so far."""
    annealing: float
    """Rival: the law of arXiv 2408.11029, fitted to another run of the task."""
    multi_power: float
    """Rival: the law of arXiv 2503.12811, fitted to the same run."""
    gradients: float
    """Rival of `over`: E_h, half the mean of (θ − m)·g."""

    @property
    def both(self) -> float:
        """Rival: what averaged weights and the power law say together."""
        return self.averaged + self.power_law


def gradients_alone(record: dict[str, Any], step: int) -> float:
    """Return E_h from the later half of the steps before a branch; nan if it was not recorded."""
    products = [row[2] for row in record["products"] if step / 2 < row[0] < step]
    return float(np.mean(products)) / 2 if products else math.nan


def branches(
    run: str, record: dict[str, Any], laws: Sequence[AnnealingLaw] = (), *, closure: bool = True
) -> Iterator[Branch]:
    """Yield the cooldowns of a run that begin after the first eighth of its trunk.

    A branch is left out if its run was stopped before the losses that it is compared with were
    known or, without a closure, before its samples of gradients were written.
    """
    for made in record["branches"]:
        step, n = made["step"], made["horizon"]
        if made["kind"] != "cooldown" or step < record["steps"] / 8:
            continue
        past, (gained, gained_over) = history(record, step), realised(record, made)
        if math.isnan(gained) or not (closure or len(past.products.steps)):
            continue
        found = outcomes(past if closure else replace(past, differences=NOTHING), n)
        if not isinstance(found, Outcomes):
            raise SystemExit(f"{run} at step {step}: {found}")
        gain, over = found.gain(KEPT, 1), found.gain(KEPT, 1, than=(1, 0))
        rivals = [law.gain(record["settings"]["lr"], step, n) for law in laws]
        annealing, multi = rivals or (math.nan, math.nan)
        before = made["held_out_before"]
        yield Branch(
            run=run,
            task=record["task"],
            step=step,
            horizon=n,
            gain=gain.value,
            margin=gain.margin,
            over=over.value,
            over_margin=over.margin,
            realised=gained,
            realised_over=gained_over,
            held_out=math.nan if before is None else before - made["held_out"],
            averaged=float(past.differences.values[-8:].mean()),
            power_law=power_law(np.array(record["losses"][:step]), n),
            annealing=annealing,
            multi_power=multi,
            gradients=gradients_alone(record, step),
        )


def summary(found: list[Branch], without: Sequence[Branch] = ()) -> str:
    """Return how far forecasts are from what happened, by task.

    Args:
        found: The branches.
        without: Those of which there are forecasts without a closure, too.
    """
    lines = [
        "| | cooldowns | realised/forecast gain: median, 10 % to 90 % | within 10 %; 20 % | "
        "in the 95 % interval | its half-width/forecast gain | "
        "held-out/forecast gain | within 10 %; 20 % | in the interval |",
        "|" + " --- |" * 9,
    ]
    for title, chosen in [
        *_by_task(found),
        ("all, without a closure", _short(without)),
        ("longer ones", [b for b in found if b.horizon >= LONG * b.step]),
    ]:
        if chosen:
            width = np.median([b.margin / b.gain for b in chosen])
            cells = [*_accuracy(chosen, "realised"), f"{width:.0%}"]
            cells += _accuracy(chosen, "held_out")
            lines.append(f"| {title} | {len(chosen)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _accuracy(found: list[Branch], name: str) -> list[str]:
    """Return a gain over its forecast, how often it is near it, and how often in its interval."""
    known = [(b, getattr(b, name)) for b in found if not math.isnan(getattr(b, name))]
    if not known:
        return ["–"] * 3
    ratios = np.array([gained / b.gain for b, gained in known])
    low, middle, high = np.percentile(ratios, [10, 50, 90])
    off = np.abs(ratios - 1)
    cover = np.mean([abs(gained - b.gain) < b.margin for b, gained in known])
    near = f"{np.mean(off < 0.1):.0%}; {np.mean(off < 0.2):.0%}"
    return [f"{middle:.2f}, {low:.2f} to {high:.2f}", near, f"{cover:.0%}"]


def errors(found: list[Branch]) -> str:
    """Return the mean errors of forecasts and rivals, in nats, by task."""
    gains = ("gain", "averaged", "power_law", "both", "annealing", "multi_power")
    overs = ("over", "averaged", "gradients")
    lines = [
        "| | gain: forecast | averaged weights | power law | their sum | law of 2408.11029 | "
        "of 2503.12811 | over staying: forecast | averaged weights | E_h |",
        "|" + " --- |" * (1 + len(gains) + len(overs)),
    ]
    for title, chosen in _by_task(found):
        if chosen:
            cells = [_mean_error([b.realised - getattr(b, name) for b in chosen]) for name in gains]
            cells += [
                _mean_error([b.realised_over - getattr(b, name) for b in chosen]) for name in overs
            ]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _by_task(found: list[Branch]) -> list[tuple[str, list[Branch]]]:
    """Return the branches of each task, of each family, and all, without the long ones."""
    short = _short(found)
    groups = {title: (task,) for task, title in TITLES.items()}
    groups |= {f"all {family}": tasks for family, tasks in FAMILIES.items()}
    chosen = [(title, [b for b in short if b.task in tasks]) for title, tasks in groups.items()]
    return [*chosen, ("all", short)]


def _short(found: Sequence[Branch]) -> list[Branch]:
    return [b for b in found if b.horizon < LONG * b.step]


def _mean_error(errors: list[float]) -> str:
    known = [abs(error) for error in errors if not math.isnan(error)]
    return f"{np.mean(known):.3f}" if known else "–"


CHANGES = {
    "half": ("half the learning rate", 0.5, 1),
    "tenth": ("a tenth of it", 0.1, 1),
    "batch": ("twice the batch", 1, 2),
}


def what_if(records: dict[str, dict[str, Any]]) -> str:
    """Return how other learning rates and batches came out, as a table."""
    lines = [
        "| what if | branches | realised/forecast gain: median, 10 % to 90 % | "
        "95 % intervals cover |",
        "|" + " --- |" * 4,
    ]
    for kind, (title, lr, batch) in CHANGES.items():
        ratios, covered = [], []
        for record in records.values():
            for made in (b for b in record["branches"] if b["kind"] == kind):
                step, n = made["step"], made["horizon"]
                found = outcomes(history(record, step), n)
                assert isinstance(found, Outcomes)
                gain = found.gain(*found.changed(lr, batch))
                if not math.isnan(gained := realised(record, made)[0]):
                    ratios.append(gained / gain.value)
                    covered.append(gain.covers(gained))
        if ratios:
            low, middle, high = np.percentile(ratios, [10, 50, 90])
            cells = f"{middle:.2f}, {low:.2f} to {high:.2f} | {np.mean(covered):.0%}"
            lines.append(f"| {title} | {len(ratios)} | {cells} |")
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
            y = [b.realised for b in chosen]
            if name == "gain":
                margins = [b.margin for b in chosen]
                axes.errorbar(x, y, xerr=margins, fmt="none", ecolor=f"C{i}", alpha=0.25)
            marker, size = ("*", 9) if task == "gpt2" else ("o", 4)
            entry = title if chosen else None
            axes.plot(x, y, marker, markersize=size, alpha=0.85, color=f"C{i}", label=entry)
        axes.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
        axes.set(xlabel=f"{label} (nats)", xscale="log", yscale="log")
        axes.set(xlim=(low, high), ylim=(low, high))
        ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_ticks([], minor=True)
    figure.axes[0].set_ylabel("gained by the cooldown (nats)")
    figure.axes[2].legend(frameon=False, fontsize=7, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _laws_of_another(run: str, records: dict[str, dict[str, Any]]) -> list[AnnealingLaw]:
    """Return the annealing laws of another run of the task.

    If possible it has the same data, learning rate and batch size, and was finished.
    """
    own = records[run]
    others = [r for name, r in records.items() if r["task"] == own["task"] and name != run]

    def distance(r: dict[str, Any]) -> tuple[bool, ...]:
        return r["data"] != own["data"], setting(r) != setting(own), not r.get("finished")

    if not others:
        return []
    source = min(others, key=distance)
    cooldowns = [b for b in source["branches"] if b["kind"] == "cooldown"]
    gains = {(b["step"], b["horizon"]): realised(source, b)[0] for b in cooldowns}
    known = {moment: gain for moment, gain in gains.items() if not math.isnan(gain)}
    losses, lr = np.array(source["losses"]), source["settings"]["lr"]
    return [fit_law(losses, lr, known, terms()) for terms in (with_momentum, multi_power)]


def main(arguments: list[str] | None = None) -> None:
    """Put the tables into the page, draw the figure, and list all branches beside the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    paths = sorted(options.records.glob("*.json"))
    records = {path.stem: json.loads(path.read_text()) for path in paths}
    laws = {run: _laws_of_another(run, records) for run in records}
    made = {run: list(branches(run, record, laws[run])) for run, record in records.items()}
    groups: dict[str, list[str]] = {name: [] for name in GROUPS}
    for run in records:
        name = next(name for name, pattern in GROUPS.items() if pattern.match(run))
        groups[name].append(run)
    new = {run: records[run] for run in groups["new"]}
    found = {name: [b for run in runs for b in made[run]] for name, runs in groups.items()}
    without = [b for run in new for b in branches(run, new[run], laws[run], closure=False)]
    if not found["new"]:
        raise SystemExit(f"{options.records} holds no branch to report")
    draw(found["new"], FIGURE)
    compared = pairs(new)
    parts = {
        "forecast": summary(found["new"], without),
        "errors": errors(found["new"]),
        "what if": what_if(new),
        "ordering": ordering(compared),
        "confirmation": confirmation(new),
        "regrets": regrets(new),
    }
    page = PAGE.read_text()
    for name, text in parts.items():
        print(text, end="\n\n")
        page = replace_table(page, name, text)
    PAGE.write_text(page)
    listed = [
        f"{title}:\n\n{summary(found[name])}" for name, title in EARLIER.items() if found[name]
    ]
    listed += [table([b for bs in made.values() for b in bs]), beginnings(records)]
    listed += [ordering(compared, steps=True)]
    (options.records / "branches.md").write_text("\n\n".join(listed) + "\n")


if __name__ == "__main__":
    main()
