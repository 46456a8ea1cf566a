"""The curves, decisions and layers of one recorded run, ready to be drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypeGuard, TypeVar

from equilibrate.runlog import records
from equilibrate.runlog.records import End, RecordError, Row
from equilibrate.runlog.runs import NAME

T = TypeVar("T")
Column = list[float | None]
"""One number for each row; None where it is undefined."""

MOST_ROWS = 2000
"""Rows of a longer record are thinned to about this number."""
MOST_COLUMNS = 240
"""Columns of the heat map of layers."""
_CONFIDENCE = 0.95
_DIGITS = 6
_KNOWN = {
    *("step", "time", "epoch", "loss", "left", "right", "residual", "stderr", "margin", "count"),
    *("lr", "lrs", "next_lr", "lowered", "reason", "judgements", "forecasts", "layers"),
}


@dataclass(frozen=True)
class Decision:
    """One decision of a scheduler."""

    row: int
    """Index of the row in which it was recorded."""
    step: float | None
    """Optimizer step."""
    lowered: bool
    """Whether the learning rate was lowered."""
    reason: str
    """Why."""
    lrs: list[float | None]
    """The learning rate of each group: from then on, if the record has it, otherwise until then."""


@dataclass(frozen=True)
class Gain:
    """Forecasts of the gain of a cooldown over one number of steps."""

    horizon: int
    """Length of the cooldown, in steps."""
    gain: Column
    """The gain at each row."""
    margin: Column
    """Half the width of its confidence interval."""


@dataclass(frozen=True)
class Layers:
    """Readings of each layer at some of the rows."""

    names: list[str]
    """The layers, in the order of the model."""
    rows: list[int]
    """The rows that have them."""
    residual: list[Column]
    """Residual of each layer at each of `rows`."""
    margin: list[Column]
    """Half the width of its confidence interval."""
    states: list[str]
    """The states that occur, such as "equilibrated" and "norm falls"; see `layers.Layer`."""
    state: list[list[int | None]]
    """State of each layer at each of `rows`, as an index of `states`; None if it is not known."""
    scale_invariant: list[bool]
    """Whether each layer was found to be scale-invariant in the last of `rows`."""
    last: dict[str, dict[str, Any]]
    """The last reading of each layer, as recorded."""


@dataclass(frozen=True)
class Run:
    """Everything that a report shows of one run. All columns have the same length."""

    title: str
    config: dict[str, Any]
    environment: dict[str, Any]
    end: End | None
    recorded: int
    """Number of rows in the record; columns have fewer if it was thinned."""
    x: dict[str, list[float]]
    """What the horizontal axis may show: `step`, and `epoch` and `time` (seconds) if recorded."""
    loss: Column
    left: Column
    right: Column
    residual: Column
    margin: Column
    """Half the width of the confidence interval of the residual."""
    count: Column
    """Number of steps in the window."""
    lrs: list[Column]
    """Learning rate of each parameter group."""
    lrs_from_now_on: bool
    """Whether these are the rates after the row, or those before it."""
    reasons: list[str | None]
    """What the scheduler said at each row."""
    decisions: list[Decision]
    """All recorded decisions, of rows that were thinned away too."""
    gains: list[Gain]
    layers: Layers | None
    others: dict[str, Column]
    """Further numbers that the user has recorded, by name."""

    @property
    def threshold(self) -> float | None:
        """The threshold of the rule, if it has one."""
        own = self.config.get("recorder", self.config)
        rule = own.get("rule", own) if isinstance(own, Mapping) else {}
        found = rule.get("threshold") if isinstance(rule, Mapping) else None
        return found if isinstance(found, int | float) else None


def load(path: Path | str, *, title: str | None = None, replica: int | None = None) -> Run:
    """Read the record of a run.

    Args:
        path: The record.
        title: Title of the run; by default the name of its folder, or of the file.
        replica: Which replica to show if the record is that of an ensemble.

    Returns:
        What is to be drawn.
    """
    return from_records(records.read(path), title or title_of(path), replica)


def title_of(record: Path | str) -> str:
    """Return the name of a run.

    >>> title_of("runs/mine/train.jsonl"), title_of("other.jsonl")
    ('mine', 'other')

    Args:
        record: Its record.

    Returns:
        The name of the folder, if the record has the usual name, or that of the file.
    """
    record = Path(record)
    return record.absolute().parent.name if record.name == NAME else record.stem


def from_records(found: records.Records, title: str, replica: int | None = None) -> Run:
    """Collect what is to be drawn from the rows of a record.

    Rows need no particular keys: what is missing is left out.

    >>> rows = [{"step": k, "loss": 1 / k, "left": 1.1, "right": 1.0} for k in (1, 2)]
    >>> from_records(records.Records({}, {}, rows), "mine").residual
    [0.1, 0.1]

    Args:
        found: The record.
        title: Title of the run.
        replica: Which replica to show if the record is that of an ensemble.

    Returns:
        What is to be drawn.

    Raises:
        RecordError: If the record has no rows.
    """
    if not found.rows:
        raise RecordError("the record has no rows yet: wait for the first one")
    rows = _one_replica(found.rows, replica)
    decisions = _decisions(rows)
    with_layers = _with_layers(rows)
    kept = _kept(rows, with_layers)
    place = {row: i for i, row in enumerate(kept)}
    decisions = [
        Decision(place.get(d.row, -1), d.step, d.lowered, d.reason, d.lrs) for d in decisions
    ]
    rows = [rows[i] for i in kept]
    return Run(
        title=title,
        config=found.config,
        environment=found.environment,
        end=found.end,
        recorded=len(found.rows),
        x=_axes(rows),
        loss=_column(rows, _loss_name(rows)),
        left=_column(rows, "left"),
        right=_column(rows, "right"),
        residual=[_rounded(_residual(row)) for row in rows],
        margin=[_rounded(_margin(row)) for row in rows],
        count=_column(rows, "count"),
        lrs=_rates(rows),
        lrs_from_now_on=any("lrs" in row or "next_lr" in row for row in rows),
        reasons=[row.get("reason") for row in rows],
        decisions=decisions,
        gains=_gains(rows),
        layers=_layers(rows, [place[i] for i in with_layers]),
        others=_others(rows),
    )


def _one_replica(rows: Sequence[Row], replica: int | None) -> list[Row]:
    """Return the rows of one replica; a run of one model has no others.

    Raises:
        RecordError: If `replica` does not fit the record.
    """
    sizes = {len(row["left"]) for row in rows if isinstance(row.get("left"), list)}
    if not sizes:
        if replica is not None:
            raise RecordError("the record is that of a single model: leave out --replica")
        return list(rows)
    size = min(sizes)
    if replica is None or not 0 <= replica < size:
        raise RecordError(
            f"the record has {size} replicas: choose one of them with --replica, 0 to {size - 1}"
        )
    return [
        {k: v[replica] if isinstance(v, list) and len(v) == size else v for k, v in row.items()}
        for row in rows
    ]


def _with_layers(rows: Sequence[Row]) -> list[int]:
    """Return which rows make up the heat map of layers."""
    found = [i for i, row in enumerate(rows) if row.get("layers")]
    stride = math.ceil(len(found) / MOST_COLUMNS) or 1
    return sorted({*found[::stride], *found[-1:]})


def _kept(rows: Sequence[Row], needed: Sequence[int]) -> list[int]:
    """Return which rows are drawn: all if there are few, or evenly many and those needed."""
    stride = math.ceil(len(rows) / MOST_ROWS)
    chosen = {*range(0, len(rows), stride), len(rows) - 1, *needed}
    chosen |= {i for i, row in enumerate(rows) if row.get("lowered")}
    return sorted(chosen)


def _axes(rows: Sequence[Row]) -> dict[str, list[float]]:
    axes = {"step": _complete(rows, "step") or list(range(1, len(rows) + 1))}
    if epochs := _complete(rows, "epoch"):
        axes["epoch"] = epochs
    if times := _complete(rows, "time"):
        axes["time"] = [round(time - times[0], 3) for time in times]
    return axes


def _complete(rows: Sequence[Row], name: str) -> list[float] | None:
    """Return a column, or None if a row does not have it."""
    values = [row.get(name) for row in rows]
    found = [value for value in values if _is_number(value)]
    return found if len(found) == len(rows) else None


def _residual(row: Mapping[str, Any]) -> float | None:
    left, right = row.get("left"), row.get("right")
    if "residual" in row or not (_is_number(left) and _is_number(right)) or right == 0:
        return row.get("residual")
    return left / right - 1


def _margin(row: Mapping[str, Any]) -> float | None:
    """Return half the width of the confidence interval of the residual."""
    if _is_number(row.get("margin")):
        return row["margin"]
    stderr = row.get("stderr")
    return NormalDist().inv_cdf((1 + _CONFIDENCE) / 2) * stderr if _is_number(stderr) else None


def _rates(rows: Sequence[Row]) -> list[Column]:
    """Return a column for each parameter group."""
    lists = [_row_rates(row) for row in rows]
    groups = max(map(len, lists))
    return [[_rounded(r[g]) if g < len(r) else None for r in lists] for g in range(groups)]


def _row_rates(row: Row) -> list[float | None]:
    """Return the learning rate of each group: from now on if it was recorded."""
    rates = next((row[name] for name in ("lrs", "next_lr", "lr") if name in row), None)
    return rates if isinstance(rates, list) else [rates]


def _decisions(rows: Sequence[Row]) -> list[Decision]:
    found = []
    for i, row in enumerate(rows):
        one = {"step": row.get("step"), "lowered": row.get("lowered"), "reason": row.get("reason")}
        one["lrs"] = _row_rates(row)
        for made in row.get("judgements", [one]):
            if made["reason"] is not None:
                lowered = bool(made["lowered"])
                found.append(Decision(i, made["step"], lowered, made["reason"], made["lrs"]))
    return found


def _gains(rows: Sequence[Row]) -> list[Gain]:
    made = [{f["horizon"]: f for f in row.get("forecasts", [])} for row in rows]
    horizons = sorted({horizon for forecasts in made for horizon in forecasts})
    return [
        Gain(
            horizon,
            [_rounded(forecasts.get(horizon, {}).get("gain")) for forecasts in made],
            [_rounded(forecasts.get(horizon, {}).get("margin")) for forecasts in made],
        )
        for horizon in horizons
    ]


def _layers(rows: Sequence[Row], chosen: list[int]) -> Layers | None:
    if not chosen:
        return None
    names = list(dict.fromkeys(name for i in chosen for name in rows[i]["layers"]))
    last = rows[chosen[-1]]["layers"]

    def each(function: Callable[[Mapping[str, Any]], T]) -> list[list[T]]:
        return [[function(rows[i]["layers"].get(name, {})) for i in chosen] for name in names]

    named = each(lambda layer: layer.get("state"))
    states = list(dict.fromkeys(s for column in named for s in column if isinstance(s, str)))
    return Layers(
        names,
        chosen,
        residual=each(lambda layer: _rounded(_residual(layer))),
        margin=each(lambda layer: _rounded(_margin(layer))),
        states=states,
        state=[[states.index(s) if s in states else None for s in column] for column in named],
        scale_invariant=[last.get(name, {}).get("scale_invariant") is True for name in names],
        last=last,
    )


def _loss_name(rows: Sequence[Row]) -> str:
    return "loss" if any("loss" in row for row in rows) else "train_loss"


def _others(rows: Sequence[Row]) -> dict[str, Column]:
    known = {*_KNOWN, _loss_name(rows)}
    names = dict.fromkeys(name for row in rows for name in row if name not in known)
    columns = {name: _column(rows, name) for name in names}
    return {name: column for name, column in columns.items() if any(v is not None for v in column)}


def _column(rows: Sequence[Row], name: str) -> Column:
    return [_rounded(row.get(name)) for row in rows]


def _rounded(value: Any) -> float | None:
    """Return a number with the digits that a drawing needs; None for anything else."""
    if not _is_number(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
