"""A run in the terminal, drawn with braille characters."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from itertools import zip_longest

from equilibrate.report.braille import chart, like
from equilibrate.report.numbers import format_number, format_residual
from equilibrate.report.run import Column, Run

_CHART_HEIGHT = 5
_LAYERS = 8
_SILENCE = 60.0
"""Seconds without a new row after which this is said."""
_COLOURS = {"dim": 2, "bold": 1, "red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36}
_LIKE = str.maketrans(
    {"−": "-", "–": "-", "±": "+-", "·": "|", "×": "x", "│": "|", "█": "#", "…": "...", "≥": ">="}
    | {chr(0x2800 + dots): like(dots) for dots in range(256)}
)
"""What stands for a character where there is ASCII alone."""
Paint = Callable[[str, str], str]
"""A function of a text and the name of a colour."""


def view(run: Run, *, width: int, age: float = 0.0, colours: bool = False) -> str:
    """Return the curves, the last forecast and decision, and the layers of a run as text.

    Args:
        run: The run.
        width: Width of the terminal in characters.
        age: Seconds since its last row.
        colours: Whether to use the colours of a terminal.

    Returns:
        The text.
    """

    def paint(text: str, colour: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if colours and text else text

    columns = 2 if width >= 90 else 1
    each = (width - 2 * (columns - 1)) // columns
    panels = [panel for panel in _charts(run, each, paint) if panel]
    lines = [*_title(run, age, width, paint), ""]
    for first in range(0, len(panels), columns):
        beside = zip_longest(*panels[first : first + columns], fillvalue="")
        lines += ["  ".join(parts).rstrip() for parts in beside] + [""]
    lines += [*_forecast(run, width, paint), *_decisions(run, width, paint)]
    lines += _layers(run, width, paint)
    return "\n".join(lines).rstrip() + "\n"


def in_ascii(text: str) -> str:
    """Return a text for a terminal that has no other characters; what has no likeness stays.

    >>> in_ascii("−0.3 ± 0.1 ⠉⠒⠤⠀│██")
    "-0.3 +- 0.1 '-- |##"

    Args:
        text: The text.

    Returns:
        The text, with curves of points for those of braille.
    """
    return text.translate(_LIKE)


def _title(run: Run, age: float, width: int, paint: Paint) -> list[str]:
    *_, row = run.rows
    parts = [f"step {row['step']:,}"]
    if "epoch" in row:
        parts.append(f"epoch {row['epoch']:.6g}")
    if speed := _steps_per_second(run):
        parts.append(f"{f'{speed:,.0f}' if speed >= 100 else format_number(speed)} steps/s")
    if run.end is not None:
        status, colour = run.end["status"], "green" if run.end["status"] == "finished" else "red"
    elif age > _SILENCE:
        status, colour = f"no new row for {_duration(age)}", "yellow"
    else:
        status, colour = f"last row {_duration(age)} ago", "dim"
    head = f"{run.title}  {' · '.join(parts)}"
    if len(f"{head}  {status}") <= width:
        return [f"{paint(head, 'bold')}  {paint(status, colour)}"]
    lines = [paint(line, "bold") for line in textwrap.wrap(head, width)]
    return lines + [paint(line, colour) for line in textwrap.wrap(status, width)]


def _charts(run: Run, width: int, paint: Paint) -> list[list[str]]:
    unit = run.threshold or 0.01
    residual, margin, loss = run.column("residual"), run.column("margin"), run.column("loss")
    forecasts = run.forecasts()

    def symmetric(value: float) -> float:
        return math.asinh(value / unit)

    after, of_after = forecasts["after"], forecasts["after_margin"]
    charts = [
        _chart("loss", loss, width, "green", paint, _log_or_none(loss)),
        _chart("a cooldown would end at", after, width, "blue", paint, None, of_after),
    ]
    rates = run.rates()
    for group, values in enumerate(rates):
        name = "learning rate" if len(rates) == 1 else f"learning rate, group {group}"
        if group == 0 or len(set(values)) > 1:
            charts.append(_chart(name, values, width, "yellow", paint, low=0.0))
    charts.append(_chart("residual L/R − 1", residual, width, "cyan", paint, symmetric, margin))
    return charts


def _chart(
    title: str,
    values: Column,
    width: int,
    colour: str,
    paint: Paint,
    transform: Callable[[float], float] | None = None,
    margins: Column | None = None,
    low: float | None = None,
) -> list[str]:
    """Return a title and the lines of a curve, all of the same width; none without a value."""
    finite = sorted(value for value in values if value is not None)
    if not finite:
        return []
    cut = len(finite) // 20 if transform is None and low is None else 0  # the first may be far off
    low, high = finite[cut] if low is None else min(low, finite[0]), finite[-1 - cut]
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    labels = {0: format_number(high), _CHART_HEIGHT - 1: format_number(low)}
    side = max(map(len, labels.values()))
    size = max(4, width - side - 1)
    lines = chart(
        values,
        width=size,
        height=_CHART_HEIGHT,
        low=low,
        high=high,
        transform=transform or (lambda value: value),
    )
    k = max(k for k, value in enumerate(values) if value is not None)
    shown = format_number(values[k], margins[k] if margins else None)
    head = f"{title}  {shown}"[: side + 1 + size]
    return [
        paint(f"{head:{side + 1 + size}}", "bold"),
        *(
            paint(f"{labels.get(k, ''):>{side}} ", "dim") + paint(line, colour)
            for k, line in enumerate(lines)
        ),
    ]


def _forecast(run: Run, width: int, paint: Paint) -> list[str]:
    if (sentence := run.sentence) is None:
        return []
    return [paint("forecast", "bold"), *textwrap.wrap(sentence, width), ""]


def _decisions(run: Run, width: int, paint: Paint) -> list[str]:
    if run.last_decision is None:
        return []
    last = run.last_decision
    lrs = ", ".join(map(format_number, last["lrs"]))
    head = f"last decision, at step {last['step']:,}, lr {lrs}"
    lines = [paint(head[:width], "bold"), *textwrap.wrap(last["reason"], width)]
    if run.lowerings and not last.get("lowered"):
        made = run.lowerings[-1]
        what = f"the learning rate was lowered {len(run.lowerings)} ×, last"
        what = "the decay began" if run.decays else what
        text = f"{what} at step {made['step']:,}: {made['reason']}"
        lines += [paint(line, "dim") for line in textwrap.wrap(text, width)]
    return [*lines, ""]


def _layers(run: Run, width: int, paint: Paint) -> list[str]:
    if not run.last_layers:
        return []
    found = sorted(run.last_layers.items(), key=lambda item: -abs(item[1].get("residual") or 0.0))
    more = f", {_LAYERS} of {len(found)}" if len(found) > _LAYERS else ""
    lines = [paint(f"layers by |L/R − 1|{more}", "bold")]
    size = max(12, min(width - 46, max(len(name) for name, _ in found)))
    for name, layer in found[:_LAYERS]:
        residual = layer.get("residual")
        short = name if len(name) <= size else f"…{name[1 - size :]}"
        value = format_residual(layer)
        bar = paint(_bar(residual), "blue" if (residual or 0.0) < 0 else "yellow")
        state = (layer.get("state") or "")[: max(0, width - size - 34)]
        lines.append(f"{short:{size}} {value:>16}  {bar}  {state}".rstrip())
    return lines


def _bar(residual: float | None, half: int = 6) -> str:
    """Return a bar from the middle: to the left if negative, logarithmic from 0.01 to 10."""
    size = 0 if residual is None else math.log10(min(max(abs(residual), 0.01), 10) / 0.01) / 3
    bar = "█" * round(size * half)
    falls = residual is not None and residual > 0
    return f"{'' if falls else bar:>{half}}│{bar if falls else '':{half}}"


def _log_or_none(values: Column) -> Callable[[float], float] | None:
    return math.log if all(value is None or value > 0 for value in values) else None


def _steps_per_second(run: Run) -> float | None:
    rows = [row for row in run.rows if "time" in row][-10:]
    made = rows[-1]["step"] - rows[0]["step"] if rows else 0
    passed = rows[-1]["time"] - rows[0]["time"] if rows else 0.0
    return made / passed if made > 0 and passed > 0 else None


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"
