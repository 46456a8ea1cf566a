"""One interactive, self-contained HTML page from the record of a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from equilibrate.record.jsonl import Row
from equilibrate.report.numbers import format_number, format_residual
from equilibrate.report.run import Run, Thinned, last, number

_MOST_OPEN = 16
"""Layers of a table that is not folded."""
_AXES = ("step", "epoch", "time")
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""The names of the columns, and the cells of each row."""


def render(run: Run) -> str:
    """Render the page of a run. It contains its data, style and script, and loads nothing.

    All text is escaped. Parts without content are left out.

    Args:
        run: The run.

    Returns:
        The HTML text.
    """
    environment = Environment(
        loader=PackageLoader("equilibrate.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {}  # keys keep their order
    layers = run.last_layers
    return environment.get_template("run.html.j2").render(
        title=run.title,
        status=_status(run),
        facts=facts(run),
        lowerings=decision_table(run.lowerings),
        decays=run.decays,
        kept=decision_table(run.kept),
        layers=layer_table(layers),
        layers_open=len(layers) <= _MOST_OPEN,
        layers_summary=_layers_summary(layers),
        settings={"Settings": _flat(run.config), "Environment": _flat(run.environment)},
        data=data(run),
    )


def facts(run: Run) -> dict[str, str]:
    """Return the numbers at the end of a run by name; those that were not recorded are left out.

    Args:
        run: The run.

    Returns:
        Names and values.
    """
    *_, row = run.rows
    found = {"Step": f"{row['step']:,}"}
    if (epoch := number(row.get("epoch"))) is not None:
        found["Epoch"] = f"{epoch:.6g}"
    if (loss := last(run.column("loss"))) is not None:
        found["Loss"] = f"{loss:.4g}"
    if rates := [rate for column in run.rates() if (rate := last(column)) is not None]:
        found["Learning rate"] = ", ".join(map(format_number, rates))
    if run.decays and run.lowerings:
        found["Decay began"] = f"at step {run.lowerings[-1]['step']:,}"
    elif run.last_decision is not None and not run.decays:
        times = len(run.lowerings)
        found["Lowered"] = f"{times} time{'s' * (times != 1)}"
    if (sentence := run.sentence) is not None:
        found["Forecast"] = sentence
    if (made := run.last_decision) is not None:
        found["Last decision"] = f"at step {made['step']:,}: {made['reason']}"
    if (residual := number(row.get("residual"))) is not None:
        found["L/R − 1"] = format_number(residual, number(row.get("margin")))
    return found


def data(run: Run) -> dict[str, Any]:
    """Return what the script of the page draws.

    Args:
        run: The run.

    Returns:
        Columns of numbers, `x` with what the horizontal axis may show. Lowerings and learning rates
        have an `x` of their own, since a decision lies between two rows.
    """
    x = _axes(run.rows)
    names = ("loss", "left", "right", "residual", "margin", "count")
    return {
        "x": x,
        **{name: run.column(name) for name in names},
        "lrs": run.rates(),
        "reasons": [_reason(row, run.decays) for row in run.rows],
        "threshold": run.threshold,
        "decays": run.decays,
        "lowerings": {
            "x": _at([made["step"] for made in run.lowerings], x),
            "lrs": [made["lrs"] for made in run.lowerings],
            "reasons": [made["reason"] for made in run.lowerings],
        },
        "rates": _rates(run, x),
        "forecast": run.forecasts(),
        "others": run.others(),
        "layers": _layers(run.layer_rows),
    }


def decision_table(decisions: Any) -> Table:
    """Return a table of decisions, each with its own step and learning rate.

    Args:
        decisions: The decisions.

    Returns:
        The table.
    """
    rows = [
        (f"{made['step']:,}", ", ".join(map(format_number, made["lrs"])), made["reason"])
        for made in decisions
    ]
    return ("Step", "Learning rate", "Reason"), rows


def layer_table(layers: Mapping[str, Row]) -> Table:
    """Return a table of the layers of a row, the largest residual first.

    Args:
        layers: The layers by name.

    Returns:
        The table. Columns that would be empty are left out.
    """
    names = sorted(layers, key=lambda n: -abs(layers[n].get("residual") or 0.0))

    def column(part: str, unit: str = "") -> list[str | None]:
        found = [layers[n].get(part) for n in names]
        return [None if v is None else format_number(v) + unit for v in found]

    columns: dict[str, list[str | None]] = {
        "Layer": [*names],
        "State": [layers[n].get("state") for n in names],
        "L/R − 1": [
            None if layers[n].get("residual") is None else format_residual(layers[n]) for n in names
        ],
        "Angular step": column("angular_step", " rad"),
        "In equilibrium": column("equilibrium", " rad"),
        "Relaxation": [_relaxation(layers[n]) for n in names],
        "Left side": column("left"),
        "Right side": column("right"),
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [tuple(cell or "–" for cell in row) for row in zip(*shown.values(), strict=True)]
    return tuple(shown), rows


def _status(run: Run) -> str:
    parts = [run.end["status"].capitalize() if run.end else "End not recorded"]
    if run.end:
        parts.append(run.end["time"].replace("T", " ").replace("+00:00", " UTC"))
    parts.append(f"{run.recorded} row{'s' * (run.recorded != 1)}")
    if (drawn := len(list(run.rows))) < run.recorded:
        parts.append(f"{drawn} of them drawn")
    if run.is_odd:
        parts.append("values of a wrong type are left out")
    return " · ".join(parts)


def _axes(rows: Thinned) -> dict[str, list[float]]:
    """Return what the horizontal axis may show: `step`, and `epoch` and `time` if all rows have it.

    Time is counted in seconds from the first row.
    """
    axes = {name: [row[name] for row in rows if name in row] for name in _AXES}
    axes = {name: axis for name, axis in axes.items() if len(axis) == len(axes["step"])}
    axes["time"] = [round(time - axes["time"][0], 3) for time in axes.get("time", ())]
    return {name: axis for name, axis in axes.items() if axis}


def _at(steps: list[float], x: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return where steps lie on each axis, between the rows."""
    axes = {name: np.array(axis, dtype=float) for name, axis in x.items()}
    found = np.array(steps, dtype=float)
    between = {name: np.interp(found, axes["step"], axes[name]).tolist() for name in x}
    return between | {"step": steps}


def _rates(run: Run, x: dict[str, list[float]]) -> dict[str, Any]:
    """Return the learning rates of all rows, and both before and after each lowering."""
    points = [(row["step"], 1, row["lrs"]) for row in run.rows if row.get("lrs")]
    points += [(made["step"], 0, made["lrs"]) for made in run.lowerings]
    steps, lists = [], []
    for step, is_row, lrs in sorted(points, key=lambda point: point[:2]):
        if not is_row and lists:
            steps.append(step)
            lists.append(lists[-1])
        steps.append(step)
        lists.append(lrs)
    groups = range(max(map(len, lists), default=0))
    values = [[number(lrs[g]) if g < len(lrs) else None for lrs in lists] for g in groups]
    return {"x": _at(steps, x), "values": values}


def _reason(row: Row, decays: bool) -> str | None:
    made, what = row.get("decisions", []), "The decay began at" if decays else "Lowered at"
    lowered = [f"{what} step {d['step']:,}: {d['reason']}" for d in made if d.get("lowered")]
    return (lowered or [d["reason"] for d in made] or [None])[-1]


def _layers(rows: Thinned) -> dict[str, Any] | None:
    """Return the heat map of layers."""
    all_layers = [row["layers"] for row in rows]
    names = list(dict.fromkeys(name for layers in all_layers for name in layers))
    if not names:
        return None

    def each(part: str) -> list[list[Any]]:
        return [[layers.get(name, {}).get(part) for layers in all_layers] for name in names]

    states = sorted({state for column in each("state") for state in column if state})
    return {
        "x": _axes(rows),
        "names": names,
        "residual": [[number(v) for v in column] for column in each("residual")],
        "margin": [[number(v) for v in column] for column in each("margin")],
        "states": states,
        "state": [[states.index(s) if s else None for s in column] for column in each("state")],
        "scale_invariant": [column[-1] is True for column in each("scale_invariant")],
    }


def _relaxation(layer: Row) -> str | None:
    """Return in how many steps the norm of a scale-invariant layer relaxes."""
    if "relaxation" not in layer:
        return None
    return "never" if layer["relaxation"] is None else f"{layer['relaxation']:,.0f} steps"


def _layers_summary(layers: Mapping[str, Row]) -> str:
    """Return how many layers are in which state."""
    states = Counter(state for layer in layers.values() if (state := layer.get("state")))
    parts = [f"{state}: {count}" for state, count in states.most_common()]
    if invariant := sum(layer.get("scale_invariant") is True for layer in layers.values()):
        parts.append(f"scale-invariant (⊥): {invariant}")
    return f"Of {len(layers)} layers, {', '.join(parts)}." if parts else ""


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Table:
    """Return nested settings as rows of names and values."""
    rows: list[tuple[str, ...]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{prefix}{name}.")[1]
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append((prefix + name, text))
    return ("Name", "Value"), rows
