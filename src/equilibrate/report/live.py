"""A run on the terminal, from its record, while another process trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from equilibrate.report.braille import chart
from equilibrate.report.numbers import format_number
from equilibrate.report.run import Column, Run, from_records, title_of
from equilibrate.runlog.records import Records, Row
from equilibrate.runlog.tail import Tail

_MOST_ROWS = 2000
_CHART_HEIGHT = 5
_LAYERS = 8
_SILENCE = 60.0
"""Seconds without a new row after which this is said."""


class Follower:
    """Collects the rows of a record as they are written, in bounded memory.

    Args:
        path: The record. It may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.tail = Tail(path)
        self._rows: list[Row] = []

    def poll(self) -> bool:
        """Read what is new.

        Returns:
            Whether anything was.
        """
        ended = self.tail.end is not None
        update = self.tail.poll()
        if update.restarted:
            self._rows.clear()
        for row in update.rows:
            if "layers" in row and self._rows:
                self._rows[-1].pop("layers", None)  # only the last ones are shown
            self._rows.append(row)
        if len(self._rows) > _MOST_ROWS:  # every other one, the last ones and all lowerings
            recent = len(self._rows) - 50
            kept = enumerate(self._rows)
            self._rows = [r for i, r in kept if i % 2 == 0 or i > recent or r.get("lowered")]
        return bool(update.rows or update.restarted or ended != (self.tail.end is not None))

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self.tail.end is not None

    def view(self) -> RenderableType:
        """Return what there is to see now."""
        path = self.tail.path
        if self.tail.header is None:
            return Text(f"Waiting for {path} …", style="dim")
        if not self._rows:
            return Text(f"{path} has no rows yet …", style="dim")
        config, environment = self.tail.header.config, self.tail.header.environment
        found = Records(config, environment, self._rows, self.tail.end)
        run = from_records(found, title_of(path))
        return Dashboard(run, age=time.time() - path.stat().st_mtime)


class Dashboard:
    """Curves, the last decision, forecasts and layers of a run, for rich to print.

    Args:
        run: The run.
        age: Seconds since its last row.
    """

    def __init__(self, run: Run, age: float = 0.0) -> None:
        self.run = run
        self.age = age

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = 2 if options.max_width >= 90 else 1
        width = options.max_width // columns
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        charts = [panel for panel in self._charts(width - 4) if panel is not None]
        below = [*self._decision(), *self._layers()]
        if len(charts) % columns and below:  # there is room beside the last chart
            charts.append(below.pop(0))
        for first in range(0, len(charts), columns):
            grid.add_row(*charts[first : first + columns])
        yield Group(self._title(), grid, *below)

    def _title(self) -> Text:
        run = self.run
        parts = [f"step {run.x['step'][-1]:,.0f}"]
        if "epoch" in run.x:
            parts.append(f"epoch {run.x['epoch'][-1]:.6g}")
        if speed := _steps_per_second(run):
            parts.append(f"{f'{speed:,.0f}' if speed >= 100 else format_number(speed)} steps/s")
        text = Text.assemble((run.title, "bold"), "  ", " · ".join(parts), "  ")
        if run.end is not None:
            good = run.end.status == "finished"
            return text.append(run.end.status, style="green" if good else "red")
        if self.age > _SILENCE:
            return text.append(f"no new row for {_duration(self.age)}", style="yellow")
        return text.append(f"last row {_duration(self.age)} ago", style="dim")

    def _charts(self, width: int) -> list[RenderableType | None]:
        run = self.run
        margin = _last(run.margin) if run.margin[-1] is not None else None
        linear = run.threshold or 0.01

        def symmetric(value: float) -> float:
            return math.asinh(value / linear)

        charts: list[RenderableType | None] = [
            _chart("residual L/R − 1", run.residual, width, "cyan", symmetric, margin),
            _chart("loss", run.loss, width, "green", _log_or_linear(run.loss)),
        ]
        for number, rates in enumerate(run.lrs):
            name = "learning rate" if len(run.lrs) == 1 else f"learning rate, group {number}"
            if number == 0 or len(set(rates)) > 1:
                charts.append(_chart(name, rates, width, "yellow", _log_or_linear(rates)))
        for gain in run.gains:
            name = f"cooldown of {gain.horizon} steps gains"
            charts.append(_chart(name, gain.gain, width, "magenta", None, gain.margin[-1]))
        return charts

    def _decision(self) -> list[RenderableType]:
        decisions = self.run.decisions
        if not decisions:
            return []
        lowered = [made for made in decisions if made.lowered]
        text = Text.assemble((decisions[-1].reason, "bold" if decisions[-1].lowered else ""))
        if lowered and not decisions[-1].lowered:
            step = f"{lowered[-1].step:,.0f}"
            text.append(f"\nlowered {len(lowered)} ×, last at step {step}: ", style="dim")
            text.append(lowered[-1].reason, style="dim")
        return [Panel(text, title="last decision", title_align="left", border_style="dim")]

    def _layers(self) -> list[RenderableType]:
        layers = self.run.layers
        if layers is None:
            return []
        found = [
            (name, residual[-1], margin[-1], layers.last.get(name, {}).get("state") or "")
            for name, residual, margin in zip(
                layers.names, layers.residual, layers.margin, strict=True
            )
        ]
        found.sort(key=lambda layer: -1.0 if layer[1] is None else abs(layer[1]), reverse=True)
        more = f", {_LAYERS} of {len(found)}" if len(found) > _LAYERS else ""
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column(f"layers by |L/R − 1|{more}", overflow="ellipsis", no_wrap=True)
        table.add_column("L/R − 1", justify="right", no_wrap=True)
        table.add_column("")
        table.add_column("", no_wrap=True)
        for name, residual, margin, state in found[:_LAYERS]:
            number = format_number(residual, margin)
            table.add_row(Text(name), number, _bar(residual), Text(state, style="dim"))
        return [table]


def _chart(
    title: str,
    values: Column,
    width: int,
    style: str,
    transform: Callable[[float], float] | None,
    margin: float | None = None,
) -> Panel | None:
    """Return a panel with a curve, or None if there is no value."""
    finite = sorted(value for value in values if value is not None)
    if not finite:
        return None
    cut = len(finite) // 20 if transform is None else 0  # the first values may be far off
    low, high = finite[cut], finite[-1 - cut]
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    labels = format_number(high), format_number(low)
    side = max(map(len, labels))
    lines = chart(
        values,
        width=max(4, width - side - 1),
        height=_CHART_HEIGHT,
        low=low,
        high=high,
        transform=transform or (lambda value: value),
    )
    text = Text()
    for number, line in enumerate(lines):
        label = {0: labels[0], _CHART_HEIGHT - 1: labels[1]}.get(number, "")
        text.append(f"{label:>{side}} ", style="dim").append(line, style=style)
        text.append("\n" if number < _CHART_HEIGHT - 1 else "")
    now = format_number(_last(values), margin)
    return Panel(text, title=Text(f"{title}  {now}"), title_align="left", border_style="dim")


def _log_or_linear(values: Sequence[float | None]) -> Callable[[float], float] | None:
    return math.log if all(value is None or value > 0 for value in values) else None


def _bar(residual: float | None, width: int = 20) -> Text:
    """Return a bar from the middle: to the left if negative, logarithmic from 0.01 to 10."""
    if residual is None:
        return Text("undefined", style="dim")
    size = math.log10(max(abs(residual), 0.01) / 0.01) / 3
    cells = min(width // 2, round(size * width / 2))
    left = " " * (width // 2 - cells) + "█" * cells if residual < 0 else " " * (width // 2)
    return Text.assemble((left, "blue"), "│", ("█" * cells if residual > 0 else "", "yellow"))


def _steps_per_second(run: Run) -> float | None:
    step, seconds = run.x["step"][-10:], run.x.get("time", [0.0])[-10:]
    made, passed = step[-1] - step[0], seconds[-1] - seconds[0]
    return made / passed if made > 0 and passed > 0 else None


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"


def _last(column: Column) -> float | None:
    return next((value for value in reversed(column) if value is not None), None)
