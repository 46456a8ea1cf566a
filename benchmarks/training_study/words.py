"""How numbers, differences and settings of a study are written."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from training_study.design import TASKS
from training_study.statistics import Difference
from training_study.statistics import mean as estimate

Table = tuple[list[str], list[list[str]]]
"""The head of a table, and its rows."""


def span(counts: Iterable[int]) -> str:
    """Return the smallest and the largest of some numbers, or the one that there is."""
    found = list(counts)
    return " to ".join(str(n) for n in sorted({min(found), max(found)}))


def fractions(found: Iterable[float]) -> str:
    """Return the smallest and the largest of some fractions."""
    numbers = sorted(found)
    return f"{numbers[0]:.2f} to {numbers[-1]:.2f}" if numbers else "–"


def setting(chosen: Mapping[str, Any], note: str = "") -> str:
    """Return a setting in words, with a note on its learning rate."""
    words = {"lr": "lr", "drop": "factor", "share": "share", "at": "at", "patience": "patience"}
    return ", ".join(
        f"{words[key]} {_plain(value)}" + note * (key == "lr") for key, value in chosen.items()
    )


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " and ".join(f"{x:g}" for x in value)
    return f"{value:g}"


def metric(task: str) -> str:
    """Return the name of a task's metric."""
    return "held-out loss" if TASKS[task].is_text else "test accuracy, %"


def _scale(task: str) -> tuple[float, int]:
    """Return what a metric is multiplied with, and its digits."""
    return (1.0, 4) if TASKS[task].is_text else (100.0, 2)


def number(task: str, value: float) -> str:
    """Return a metric with the digits of its task."""
    factor, digits = _scale(task)
    return f"{factor * value:.{digits}f}"


def mean(task: str, values: Sequence[float]) -> str:
    """Return the mean of a metric over seeds, and half its 95 % interval."""
    found = estimate(values)
    return f"{number(task, found.value)} ± {number(task, found.margin)}"


def difference(task: str, found: Difference | None, *, verdict: bool = True) -> str:
    """Return a difference, positive if better, and its verdict."""
    if found is None:
        return "–"
    factor, digits = _scale(task)
    value, margin = factor * found.estimate.value, factor * found.estimate.margin
    text = f"{value:+.{digits}f} ± {margin:.{digits}f}".replace("-", "−")
    return f"{text}, {found.verdict}" if verdict else text


def steps(found: Iterable[int | None]) -> str:
    """Return the median over seeds, runs that never reach the goal counted as infinite."""
    steps = sorted(math.inf if step is None else step for step in found)
    median = steps[len(steps) // 2] if len(steps) % 2 else sum(steps[len(steps) // 2 - 1 :][:2]) / 2
    reached = sum(map(math.isfinite, steps))
    words = "never" if math.isinf(median) else f"{median:,.0f}"
    return words if reached == len(steps) else f"{words} ({reached} of {len(steps)} runs)"


def machine(where: Mapping[str, Any]) -> str:
    """Return what a run was made on."""
    return where["gpu"] or "a CPU"
