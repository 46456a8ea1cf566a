"""Where trainings end that decay at several moments, by `Cooldown`, or as a cosine."""

from typing import Any

import numpy as np
from forecast_records import TITLES, history

from equilibrate.forecast.outcome import outcomes
from equilibrate.schedulers.cooldown import judge

SHARES = (0.5, 0.3, 0.2, 0.1)
"""Fixed shares of the steps that a decay may take."""
Record = dict[str, Any]


def confirmation(records: dict[str, Record]) -> str:
    """Return held-out losses at the end of each schedule, at the best of its rates, as a table."""
    names = ["cosine", "cosine to a tenth", 0.2, 0.1, "averaged"]
    lines = [
        "| task, seed | rates | cosine | cosine to a tenth | last 0.2 | last 0.1 | "
        "averaged weights | `Cooldown` (its share) |",
        "|" + " --- |" * 8,
    ]
    for task, title in TITLES.items():
        for seed in sorted({r["seed"] for r in records.values() if r["task"] == task}):
            runs = [r for r in records.values() if (r["task"], r["seed"]) == (task, seed)]
            runs = [r for r in runs if "Cooldown" in r["schedules"]]
            if not runs:
                continue
            ends: list[dict[Any, float]] = [{**_fixed(r), **r["schedules"]} for r in runs]
            cells = [_loss(_best(ends, name)) for name in names]
            best = min(runs, key=lambda r: r["schedules"]["Cooldown"])
            share = best["decays"]["Cooldown"] / best["steps"]
            cells.append(f"{_loss(best['schedules']['Cooldown'])} ({share:.2g})")
            lines.append(f"| {title}, {seed} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _best(ends: list[dict[Any, float]], name: Any) -> float | None:
    return min(end[name] for end in ends) if all(name in end for end in ends) else None


def _fixed(record: Record) -> dict[float, float]:
    """Return where decays over the last shares of the steps ended."""
    total = record["steps"]
    return {
        made["horizon"] / total: made["held_out"]
        for made in record["branches"]
        if made["step"] + made["horizon"] == total and made["kind"] == "cooldown"
    }


def chosen_share(record: Record) -> float:
    """Return the share of the steps that `Cooldown` would decay over."""
    total = record["steps"]
    for step in sorted({*range(100, total, 100), round(0.8 * total), round(0.9 * total)}):
        left = total - step
        if judge(outcomes(history(record, step), left), left, left / total)[0]:
            return left / total
    raise AssertionError("it begins at the last when a tenth is left")


def beginnings(records: dict[str, Record]) -> str:
    """Return where trainings end that begin their decay at several shares, as a table."""
    kinds = ("averaged", "cosine", "cosine to a tenth")
    lines = [
        "| run | "
        + " | ".join(f"last {share:g}" for share in SHARES)
        + " | `Cooldown` (its share) | averaged weights | cosine | cosine to a tenth |",
        "|" + " --- |" * 9,
    ]
    for name, record in records.items():
        ends = _fixed(record)
        if {0.2, 0.1} <= set(ends):
            share = chosen_share(record)
            cells = [_loss(ends.get(u)) for u in SHARES]
            known = sorted(ends)
            end = np.interp(share, known, [ends[u] for u in known]) if share <= known[-1] else None
            cells.append(f"{_loss(end)} ({share:.2g})")
            others = [record["schedules"].get(kind) for kind in kinds]
            cells += [_loss(loss) for loss in others]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"
