"""One recorded run, thinned to what a page or a terminal can show."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from equilibrate.record import jsonl
from equilibrate.record.jsonl import RecordError, Row
from equilibrate.record.observe import KEYS, forecast_of
from equilibrate.record.recorder import NAME, record_path

Column = list[float | None]
"""One number for each row; None where it is undefined."""

_DIGITS = 6
_LARGEST = 1e300
"""A number that is drawn is smaller, so that differences are finite."""


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
        self.is_odd = False
        """Whether some of them have values of a wrong type, which are left out."""
        self.rows = Thinned(self.MOST_ROWS, partial(self._check, without="layers"))
        """Rows without layers."""
        self.layer_rows = Thinned(
            self.MOST_LAYER_ROWS, lambda row: {"layers": {}} | self._check(row)
        )
        """Rows with layers."""
        self.lowerings: deque[Row] = deque(maxlen=self.MOST_DECISIONS)
        """Decisions that lowered the learning rate."""
        self.kept: deque[Row] = deque(maxlen=self.MOST_DECISIONS)
        """Other decisions."""
        self.last_decision: Row | None = None
        self.last_forecast: Row = {}
        """Step and forecast of the last row that has one."""

    def add(self, row: Row) -> None:
        """Add a row of the record.

        Args:
            row: The row. What it lacks is not shown.
        """
        self.recorded += 1
        if not _is_number(row.get("step")):
            self.is_odd |= row.get("step") is not None
            row = {**row, "step": self.recorded}
        if "decisions" in row and _CHECKS["decisions"](row["decisions"]):
            for made in row["decisions"]:
                (self.lowerings if made.get("lowered") else self.kept).append(made)
                self.last_decision = made
        if row.get("layers"):
            self.layer_rows.add(row)
        if row.get("forecast"):
            self.last_forecast = {name: row[name] for name in ("step", "forecast")}
        self.rows.add(row)

    def _check(self, row: Row, without: str | None = None) -> Row:
        """Return what can be shown of a row; what has another type than a `Recorder` writes, not.

        Only rows that are drawn are checked.
        """
        known = {name: value for name, value in row.items() if value is not None}
        found = {
            name: value
            for name, value in known.items()
            if name != without and (name not in _CHECKS or _CHECKS[name](value))
        }
        self.is_odd |= len(found) + (without in known) < len(known)
        return found

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
        if (made := forecast_of(self._check(self.last_forecast))) is None:
            return None
        *_, row = self.rows
        return str(made) if row["step"] == made.step else f"at step {made.step:,}: {made}"

    @property
    def last_layers(self) -> dict[str, Row]:
        """The layers of the last row that has some, by name."""
        *_, row = [{"layers": {}}, *self.layer_rows]
        return row["layers"]

    @property
    def threshold(self) -> float | None:
        """The threshold of the rule, if it has one."""
        return number(self._settings.get("threshold"))

    @property
    def decays(self) -> bool:
        """Whether a lowering is the beginning of a decay, as that of a `Cooldown`."""
        return "total_steps" in self._settings

    @property
    def _settings(self) -> Mapping[str, Any]:
        """The settings of what is recorded."""
        own = self.config.get("recorder")
        return own if isinstance(own, Mapping) else {}


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
        check: Returns what is shown of a row.
    """

    def __init__(self, most: int, check: Callable[[Row], Row] = lambda row: row) -> None:
        self._most, self._check = most, check
        self._stride, self._count = 1, 0
        self._kept: list[Row] = []
        self._last: Row = {}

    def add(self, row: Row) -> None:
        """Add a row.

        Args:
            row: The row.
        """
        if self._count % self._stride == 0:
            row = self._check(row)
            self._kept.append(row)
        self._last = row
        self._count += 1
        if len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self._stride *= 2

    def __iter__(self) -> Iterator[Row]:
        yield from self._kept
        if self._kept and self._kept[-1] is not self._last:
            yield self._check(self._last)


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
            end = line["end"] if isinstance(line["end"], dict) else {}
            run.end = {name: str(end.get(name, "?")) for name in ("status", "time")}
        else:
            run.add(line)
    return run if run.recorded else None


def _is_number(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < _LARGEST


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(part is None or _is_number(part) for part in value)


def _is_decision(value: Any) -> bool:
    checks = {"step": _is_number, "reason": _is_text, "lrs": _are_numbers}
    return isinstance(value, dict) and all(check(value.get(k)) for k, check in checks.items())


def _is_forecast(value: Any) -> bool:
    if not isinstance(value, dict) or not _is_number(value.get("horizon")):
        return False
    return all(
        v is None or (_is_text if k == "undefined" else _is_number)(v) for k, v in value.items()
    )


def _is_layer(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(
        v is None or (_is_text(v) if k == "state" else isinstance(v, bool) or _is_number(v))
        for k, v in value.items()
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(KEYS | {"epoch"}, _is_number),
    "lrs": _are_numbers,
    "decisions": lambda value: isinstance(value, list) and all(map(_is_decision, value)),
    "forecast": _is_forecast,
    "layers": lambda value: isinstance(value, dict) and all(map(_is_layer, value.values())),
}
"""Whether the value of each key of a `Recorder` has the type that it writes."""


def number(value: Any) -> float | None:
    """Return a finite number with six digits, and None for anything else."""
    if not _is_number(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def last(column: Column) -> float | None:
    """Return the last number of a column."""
    return next((value for value in reversed(column) if value is not None), None)
