"""One recorded run, thinned to what a page or a terminal can show."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from equilibrate.record import jsonl
from equilibrate.record.jsonl import RecordError, Row
from equilibrate.record.observe import KEYS, forecast_of
from equilibrate.record.recorder import NAME, record_path

Column = list[float | None]
"""One number for each row; None where it is undefined."""

_DIGITS = 6


class Run:
    """What is shown of a run. Rows are added one by one, in bounded memory.

    Args:
        title: Title of the run.
        config: Its settings.
        environment: Versions, machine and time.
    """

    MOST_ROWS = 2000
    """Rows of a longer record are thinned to about this number."""
    MOST_LAYER_ROWS = 240
    MOST_DECISIONS = 500

    def __init__(self, title: str, config: dict[str, Any], environment: dict[str, Any]) -> None:
        self.title = title
        self.config = config
        self.environment = environment
        self.end: dict[str, str] | None = None
        """`status` and `time` of the end; None if the run continues or was killed."""
        self.recorded = 0
        """Number of rows in the record."""
        self.rows = Thinned(self.MOST_ROWS)
        """Rows without layers."""
        self.layer_rows = Thinned(self.MOST_LAYER_ROWS)
        """Rows with layers."""
        self.lowerings: deque[Row] = deque(maxlen=self.MOST_DECISIONS)
        """Decisions that lowered the learning rate."""
        self.kept: deque[Row] = deque(maxlen=self.MOST_DECISIONS)
        """Other decisions."""
        self.last_decision: Row | None = None
        self.last_forecast: Row = {}
        """The last row that has a forecast."""

    def add(self, row: Row) -> None:
        """Add a row of the record.

        Args:
            row: The row. What it lacks is not shown.
        """
        self.recorded += 1
        row.setdefault("step", self.recorded)
        for made in row.get("decisions", ()):
            (self.lowerings if made["lowered"] else self.kept).append(made)
            self.last_decision = made
        if row.get("layers"):
            self.layer_rows.add(row)
        row = {name: value for name, value in row.items() if name != "layers"}
        if row.get("forecast"):
            self.last_forecast = row
        self.rows.add(row)

    def column(self, name: str) -> Column:
        """Return the numbers of one name, with the digits that a drawing needs.

        Args:
            name: The name, such as `loss`.

        Returns:
            One number for each of `rows`.
        """
        return [number(row.get(name)) for row in self.rows]

    def rates(self) -> list[Column]:
        """Return the learning rates of each parameter group."""
        lists = [row.get("lrs") or [] for row in self.rows]
        groups = range(max(map(len, lists)))
        return [[number(r[g]) if g < len(r) else None for r in lists] for g in groups]

    def forecasts(self) -> dict[str, Column]:
        """Return the numbers of the forecasts by name, those that are drawn."""
        made = [row.get("forecast") or {} for row in self.rows]
        names = ("after", "after_margin", "staying", "horizon")
        return {name: [number(forecast.get(name)) for forecast in made] for name in names}

    def others(self) -> dict[str, Column]:
        """Return further numbers that the user has recorded, by name."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        columns = {name: self.column(name) for name in names if name not in KEYS | {"epoch"}}
        return {name: column for name, column in columns.items() if last(column) is not None}

    @property
    def sentence(self) -> str | None:
        """What the last forecast says, and at which step if later rows have none."""
        if (made := forecast_of(self.last_forecast)) is None:
            return None
        *_, row = self.rows
        return str(made) if row is self.last_forecast else f"at step {made.step:,}: {made}"

    @property
    def threshold(self) -> float | None:
        """The threshold of the rule, if it has one."""
        own = self.config.get("recorder")
        return number(own.get("threshold")) if isinstance(own, Mapping) else None


class Thinned:
    """A list of rows: all of them if there are few, then every second, every fourth, and so on.

    The last one is always in it.

    >>> rows = Thinned(4)
    >>> for k in range(10):
    ...     rows.add({"step": k})
    >>> [row["step"] for row in rows]
    [0, 4, 8, 9]

    Args:
        most: How many rows to keep, and the last one.
    """

    def __init__(self, most: int) -> None:
        self._most, self._stride, self._count = most, 1, 0
        self._kept: list[Row] = []
        self._last: Row = {}

    def add(self, row: Row) -> None:
        """Add a row.

        Args:
            row: The row.
        """
        self._last = row
        if self._count % self._stride == 0:
            self._kept.append(row)
        self._count += 1
        if len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self._stride *= 2

    def __iter__(self) -> Iterator[Row]:
        yield from self._kept
        if self._kept and self._kept[-1] is not self._last:
            yield self._last


def find_record(run: Path | str, *, missing_ok: bool = False) -> Path:
    """Find the record of a run.

    Args:
        run: A record, or a folder that contains `train.jsonl` or one other record.
        missing_ok: Whether to return where the record will be if there is none yet.

    Returns:
        The record.

    Raises:
        RecordError: If there is none, or a folder has several.
    """
    path = record_path(run)
    found = [path] if path.exists() else sorted(Path(run).glob("*.jsonl"))
    if len(found) > 1:
        names = ", ".join(p.name for p in found)
        raise RecordError(f"{run} has several records ({names}): name one of them")
    if not found and not missing_ok:
        raise RecordError(
            f"{path} does not exist: record a run with equilibrate.Recorder({str(run)!r}, …)"
        )
    return found[0] if found else path


def load(path: Path | str, title: str | None = None) -> Run | None:
    """Read the record of a run.

    Args:
        path: The record.
        title: Title of the run; by default the name of its folder, or of the file.

    Returns:
        The run; None if it has no rows yet.
    """
    path = Path(path)
    lines = jsonl.read_lines(path)
    if (header := next(lines, None)) is None:
        return None
    name = path.absolute().parent.name if path.name == NAME else path.stem
    run = Run(title or name, header["config"], header["environment"])
    for line in lines:
        if jsonl.is_end(line):
            run.end = line["end"]
        else:
            run.add(line)
    return run if run.recorded else None


def number(value: Any) -> float | None:
    """Return a finite number with six digits, and None for anything else."""
    if not _is_number(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def last(column: Column) -> float | None:
    """Return the last number of a column."""
    return next((value for value in reversed(column) if value is not None), None)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
