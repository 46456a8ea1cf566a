"""Where trainings end that decay at several moments, by `Cooldown`, or as a cosine."""

from typing import Any

import numpy as np
from forecast_records import TITLES

SHARES = (0.5, 0.3, 0.2, 0.1)
"""Fixed shares of the steps that a decay may take."""
SCHEDULES = ("Cooldown", "averaged", "cosine", "cosine to a tenth")
Record = dict[str, Any]


def ends(record: Record) -> dict[Any, float]:
    """Return held-out losses at the end of all schedules, and the "share" that `Cooldown` chose.

    There are none if decays over the last fifth and the last tenth are not recorded, or if no
    training was made with `Cooldown`.
    """
    total = record["steps"]
    found: dict[Any, float] = {
        made["horizon"] / total: made["held_out"]
        for made in record["branches"]
        if made["step"] + made["horizon"] == total and made["kind"] == "cooldown"
    }
    if not {0.2, 0.1} <= set(found) or "Cooldown" not in record["schedules"]:
        return {}
    return found | record["schedules"] | {"share": record["decays"]["Cooldown"] / total}


def confirmation(records: dict[str, Record]) -> str:
    """Return where schedules end, each at the best of its settings, as a table by task and seed."""
    lines = [
        "| task, seed | settings | last 0.2 | last 0.1 | `Cooldown` (its share) | "
        "averaged weights | cosine | cosine to a tenth |",
        "|" + " --- |" * 8,
    ]
    for task, title in TITLES.items():
        found = [(r["seed"], ends(r)) for r in records.values() if r["task"] == task]
        for chosen in sorted({seed for seed, end in found if end}):
            runs = [end for seed, end in found if seed == chosen and end]
            made = [[end[name] for end in runs if name in end] for name in (0.2, 0.1, *SCHEDULES)]
            cells = [_loss(min(losses, default=None)) for losses in made]
            cells[2] += f" ({min(runs, key=lambda end: end['Cooldown'])['share']:.2g})"
            lines.append(f"| {title}, {chosen} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def regrets(records: dict[str, Record]) -> str:
    """Return how far above the best fixed share trainings end, as a table by task.

    Of the runs that were branched at three fixed shares or more.
    """
    lines = [
        "| task | runs | last 0.5 | last 0.3 | last 0.2 | last 0.1 | `Cooldown` (its shares) | "
        "began before the last fifth |",
        "|" + " --- |" * 8,
    ]
    for task, title in TITLES.items():
        found = [ends(r) for r in records.values() if r["task"] == task]
        runs = [end for end in found if len(end.keys() & {*SHARES}) >= 3]
        if runs:
            best = [min(end[u] for u in SHARES if u in end) for end in runs]
            shares = [end["share"] for end in runs]
            cells = []
            for name in (*SHARES, "Cooldown"):
                above = [end[name] - b for end, b in zip(runs, best, strict=True) if name in end]
                cells.append(_loss(float(np.mean(above)) if above else None))
            cells[-1] += f" ({min(shares):.2g} to {max(shares):.2g})"
            cells.append(str(sum(share > 0.2 for share in shares)))
            lines.append(f"| {title} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def beginnings(records: dict[str, Record]) -> str:
    """Return where trainings end that begin their decay at several shares, as a table by run."""
    lines = [
        "| run | last 0.5 | last 0.3 | last 0.2 | last 0.1 | `Cooldown` (its share) | "
        "averaged weights | cosine | cosine to a tenth |",
        "|" + " --- |" * 9,
    ]
    for name, record in records.items():
        if end := ends(record):
            cells = [_loss(end.get(schedule)) for schedule in (*SHARES, *SCHEDULES)]
            cells[4] += f" ({end['share']:.2g})"
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"
