"""One interactive, self-contained HTML page from the record of a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from equilibrate.report.numbers import format_number
from equilibrate.report.page import template
from equilibrate.report.run import Column, Decision, Layers, Run
from equilibrate.report.tables import Table

_DRAWN = (
    *("x", "loss", "left", "right", "residual", "margin", "count", "lrs", "lrs_from_now_on"),
    *("reasons", "decisions", "gains", "others", "threshold"),
)
"""Fields of a run that its curves need."""
_MOST_KEPT = 500
_MOST_OPEN = 16
"""Layers of a table that is not folded."""


@dataclass(frozen=True)
class Fact:
    """A number of the run's end, shown at the top of the page."""

    name: str
    value: str
    wide: bool = False


def render(run: Run) -> str:
    """Render the page of a run. It contains its data, style and script, and loads nothing.

    All text is escaped. Parts without content are left out.

    Args:
        run: The run.

    Returns:
        The HTML text.
    """
    lowered = [made for made in run.decisions if made.lowered]
    kept = [made for made in run.decisions if not made.lowered]
    return template("run.html.j2").render(
        title=run.title,
        status=_status(run),
        facts=facts(run),
        lowerings=[_shown(made) for made in lowered],
        kept=[_shown(made) for made in kept[-_MOST_KEPT:]],
        kept_summary=_kept_summary(len(kept)),
        layers=layer_table(run.layers) if run.layers else None,
        layers_open=run.layers is not None and len(run.layers.names) <= _MOST_OPEN,
        layers_summary=_layers_summary(run.layers) if run.layers else "",
        tables=[
            Table("Settings", ("Setting", "Value"), _flat(run.config)),
            Table("Environment", ("What", "Value"), _flat(run.environment)),
        ],
        data=_data(run),
    )


def facts(run: Run) -> list[Fact]:
    """Return the numbers at the end of a run.

    Args:
        run: The run.

    Returns:
        Their names and values; those that were not recorded are left out.
    """
    found = [Fact("Step", _whole(run.x["step"][-1]))]
    if "epoch" in run.x:
        found.append(Fact("Epoch", f"{run.x['epoch'][-1]:.6g}"))
    if (loss := _last(run.loss)) is not None:
        found.append(Fact("Loss", f"{loss:.4g}"))
    if (residual := _last(run.residual)) is not None:
        at = max(i for i, value in enumerate(run.residual) if value is not None)
        found.append(Fact("L/R − 1", format_number(residual, run.margin[at])))
    rates = [format_number(rate) for column in run.lrs if (rate := _last(column)) is not None]
    if rates:
        found.append(Fact("Learning rate", ", ".join(rates)))
    if run.decisions:
        times = sum(made.lowered for made in run.decisions)
        found.append(Fact("Lowered", f"{times} time{'s' * (times != 1)}"))
    for gain in run.gains:
        if gain.gain[-1] is not None:
            value = format_number(gain.gain[-1], gain.margin[-1])
            found.append(Fact(f"Cooldown of {gain.horizon} steps gains", value))
    if run.decisions:
        found.append(Fact("Last decision", run.decisions[-1].reason, wide=True))
    return found


def _status(run: Run) -> str:
    parts = [run.end.status.capitalize() if run.end else "End not recorded"]
    if run.end:
        parts.append(run.end.time.replace("T", " ").replace("+00:00", " UTC"))
    parts.append(f"{run.recorded} row{'s' * (run.recorded != 1)}")
    if (drawn := len(run.loss)) < run.recorded:
        parts.append(f"{drawn} of them drawn")
    return " · ".join(parts)


def _data(run: Run) -> dict[str, Any]:
    """Return what the script draws."""
    data = {name: getattr(run, name) for name in _DRAWN}
    data["decisions"] = [asdict(made) for made in run.decisions if made.row >= 0]
    data["gains"] = [asdict(gain) for gain in run.gains]
    layers = None if run.layers is None else asdict(run.layers)
    if layers is not None:
        del layers["last"]
    return {**data, "layers": layers}


def _shown(made: Decision) -> dict[str, Any]:
    rate = ", ".join(format_number(rate) for rate in made.lrs)
    return {"step": _whole(made.step), "rate": rate, "lowered": made.lowered, "reason": made.reason}


def _kept_summary(count: int) -> str:
    if count > _MOST_KEPT:
        return f"The last {_MOST_KEPT} of {count} decisions to keep the learning rate"
    return f"{count} decision{'s' * (count != 1)} to keep the learning rate"


def layer_table(layers: Layers) -> Table:
    """Return a table of the last readings of all layers, the largest residual first.

    Args:
        layers: The layers.

    Returns:
        The table. Columns that would be empty are left out.
    """
    last = layers.last

    def size(name: str) -> float:
        residual = last[name].get("residual")
        return -1.0 if residual is None else abs(residual)

    margins = dict(zip(layers.names, (column[-1] for column in layers.margin), strict=True))
    names = sorted(last, key=size, reverse=True)
    columns = {
        "Layer": names,
        "State": [last[name].get("state") for name in names],
        "L/R − 1": [format_number(last[name].get("residual"), margins[name]) for name in names],
        "Angular step": [_radians(last[name].get("angular_step")) for name in names],
        "In equilibrium": [_radians(last[name].get("equilibrium")) for name in names],
        "Relaxation": [_relaxation(last[name]) for name in names],
        "Left side": [format_number(last[name].get("left")) for name in names],
        "Right side": [format_number(last[name].get("right")) for name in names],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [tuple(cell or "–" for cell in row) for row in zip(*shown.values(), strict=True)]
    return Table("Layers", tuple(shown), rows)


def _radians(angle: float | None) -> str | None:
    return None if angle is None else f"{format_number(angle)} rad"


def _relaxation(layer: Mapping[str, Any]) -> str | None:
    """Return in how many steps the norm of a scale-invariant layer relaxes."""
    if "relaxation" not in layer:
        return None
    steps = layer["relaxation"]
    return "never" if steps is None else f"{_whole(steps)} steps"


def _layers_summary(layers: Layers) -> str:
    """Return how many layers are in which state."""
    states = Counter(state for layer in layers.last.values() if (state := layer.get("state")))
    parts = [f"{state}: {count}" for state, count in states.most_common()]
    if invariant := sum(layers.scale_invariant):
        parts.append(f"scale-invariant (⊥): {invariant}")
    return f"Of {len(layers.last)} layers, {', '.join(parts)}." if parts else ""


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as rows of names and values."""
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{prefix}{name}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append((prefix + name, text))
    return rows


def _last(column: Column) -> float | None:
    """Return the last number of a column."""
    return next((value for value in reversed(column) if value is not None), None)


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
