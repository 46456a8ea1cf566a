"""Which of two runs ends lower after a cooldown, as told by forecasts and by losses."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from forecast_records import TITLES, history, setting

from equilibrate.forecast.outcome import KEPT, Outcomes, outcomes


@dataclass(frozen=True)
class Pair:
    """Two runs at one moment, and what tells which of them ends lower after a cooldown."""

    task: str
    step: int
    right: np.ndarray
    """Whether forecast, loss and averaged weights tell it: of training and of held-out losses."""


def pairs(records: dict[str, dict[str, Any]]) -> list[Pair]:
    """Return all pairs of runs on the same data with other learning rates or batch sizes."""
    ends: dict[tuple[Any, ...], list[tuple[dict[str, Any], np.ndarray, np.ndarray]]] = {}
    for record in records.values():
        for made in record["branches"]:
            if made["kind"] == "cooldown":
                moment = record["task"], record["data"], made["step"], made["horizon"]
                ends.setdefault(moment, []).append((record, *_ends(record, made)))
    return [
        Pair(moment[0], moment[2], (reached < others)[:, None] == (told < other))
        for moment, runs in ends.items()
        for (a, reached, told), (b, others, other) in itertools.combinations(runs, 2)
        if setting(a) != setting(b)
    ]


def ordering(found: list[Pair], *, steps: bool = False) -> str:
    """Return how many pairs are ordered as after a cooldown, as a table by task.

    Args:
        found: The pairs.
        steps: Whether each step has a row of its own.
    """
    lines = [
        "| | pairs | as training losses: forecast | loss | averaged weights | "
        "as held-out losses: forecast | loss | averaged weights |",
        "|" + " --- |" * 8,
    ]
    rows = [(title, [p for p in found if p.task == task]) for task, title in TITLES.items()]
    if steps:
        rows = [
            (f"{title}, {step:,}", [p for p in chosen if p.step == step])
            for title, chosen in rows
            for step in sorted({p.step for p in chosen})
        ]
    for title, chosen in [*rows, ("all", found)]:
        if chosen:
            cells = np.sum([p.right for p in chosen], axis=0).ravel()
            lines.append(f"| {title} | {len(chosen):,} | {' | '.join(map('{:,}'.format, cells))} |")
    return "\n".join(lines)


def _ends(record: dict[str, Any], made: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return losses after a cooldown, training and held-out, and what tells them.

    That is the forecast, the loss before, and the loss of averaged weights.
    """
    step = made["step"]
    end = np.array([np.mean(made["coming"] or made["held_out"]), made["held_out"]])
    past = history(record, step)
    found = outcomes(past, made["horizon"])
    assert isinstance(found, Outcomes), found
    loss = float(np.mean(record["losses"][step - 100 : step]))
    averaged = loss - float(past.differences.values[-8:].mean())
    return end, np.array([found.loss(KEPT, 1).value, loss, averaged])
