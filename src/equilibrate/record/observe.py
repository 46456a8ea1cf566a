"""What monitors, forecasters and schedulers say at one moment, for records and loggers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from equilibrate.estimates import Estimate
from equilibrate.forecast.values import Forecast
from equilibrate.monitor.layers import Layer

KEYS = {
    *("step", "time", "loss", "lrs", "forecast", "decisions"),
    *("left", "right", "residual", "stderr", "margin", "count", "layers"),
}
"""The keys of a row that are not the user's own; `Recorder` says what they hold."""
_SIDES = ("left", "right", "residual")
_LOGGED = ("after", "after_margin", "now", "staying", "gain", "gain_margin", "horizon")
"""What a logger gets of a forecast."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """What there is to observe on one optimizer. Each part may be missing, but not all of them."""

    monitor: Any = None
    """An `eq.Monitor`, for readings and layers."""
    forecaster: Any = None
    """An `eq.Forecaster`, for forecasts."""
    scheduler: Any = None
    """A scheduler with decisions."""

    @classmethod
    def of(cls, *sources: Any) -> Sources:
        """Sort what a user has passed, and what a scheduler holds.

        Args:
            sources: Monitors, forecasters and schedulers.

        Returns:
            The first one of each kind.

        Raises:
            TypeError: If one of them is none of these.
        """
        found: dict[str, Any] = {}
        for source in sources or (None,):
            held = (source, getattr(source, "monitor", None), getattr(source, "forecaster", None))
            kinds = {"monitor": "reading", "forecaster": "forecast", "scheduler": "last_decision"}
            parts = {k: p for k, sign in kinds.items() for p in held if hasattr(p, sign)}
            if not parts:
                raise TypeError(
                    "source must be an eq.Monitor, an eq.Forecaster or a scheduler of equilibrate, "
                    f"got {type(source).__name__}"
                )
            found = parts | found
        return cls(**found)

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return (self.scheduler or self.monitor or self.forecaster).optimizer

    @property
    def step(self) -> int:
        """Optimizer steps so far. A scheduler that knows its length counts them itself."""
        if hasattr(self.scheduler, "total_steps"):
            return self.scheduler.last_epoch
        return (self.monitor or self.forecaster).step

    @property
    def decisions(self) -> list[Any]:
        """The decisions that the scheduler remembers, the newest last."""
        return list(getattr(self.scheduler, "decisions", ()))


def observe(sources: Sources, *, layers: bool = False) -> dict[str, Any]:
    """Return all there is to say now but decisions, in the format of a row; see `Recorder`.

    It waits for the device. If parameters are sharded, every process must call it.

    Args:
        sources: What to observe.
        layers: Whether to read each parameter. The monitor must know their names.

    Returns:
        The row. Numbers that are undefined are nan.

    Raises:
        ValueError: If layers are wanted, but there is no monitor.
    """
    row: dict[str, Any] = {"step": sources.step}
    if layers and sources.monitor is None:
        raise ValueError("layers=True needs a monitor: pass an eq.Monitor, too")
    if sources.monitor is not None:
        read = sources.monitor.read()
        reading = read.whole
        last = getattr(sources.scheduler, "last_decision", None)
        if not reading.count and last is not None and last.reading is not None:
            reading = last.reading  # lowering has just restarted the window
        row |= {name: getattr(reading, name) for name in (*_SIDES, "stderr", "margin", "count")}
        if layers:
            threshold = getattr(getattr(sources.scheduler, "rule", None), "threshold", 0.01)
            table = read.layers(threshold)  # before the first step, too: it raises without names
            if read.whole.count:
                row["layers"] = {layer.name: _layer(layer) for layer in table.layers}
    groups = sources.optimizer.param_groups
    row["lrs"] = [float(group.get("lr", math.nan)) for group in groups]
    if sources.forecaster is not None and sources.forecaster.is_attached:
        row["forecast"] = _forecast(sources.forecaster.forecast())
    return row


def scalars(*sources: Any, layers: bool = False) -> dict[str, float]:
    """Return what there is to say now as named numbers, for a logger.

    The numbers are those of a row, which `Recorder` describes. Their names are

    - `equilibrate/lr`, or `equilibrate/lr/group_0` and so on if the groups have different ones;
    - `equilibrate/forecast/after`, `…/after_margin`, `…/now`, `…/staying`, `…/gain`,
      `…/gain_margin` and `…/horizon` of a forecaster;
    - `equilibrate/left`, `…/right`, `…/residual`, `…/residual_low`, `…/residual_high` (the ends of
      its 95 % interval) and `…/count` of a monitor;
    - `equilibrate_layers/<name>/left`, `…/right`, `…/residual`, and of scale-invariant weights
      `…/angular_step` and `…/equilibrium_angular_step`, with `layers`.

    The sides are those of the current window. Right after a lowering, which restarts the window,
    they are the ones that were judged. Numbers that are undefined are left out.

    It waits for the device, so call it once in a while. If parameters are sharded, every process
    must call it.

    Args:
        sources: A scheduler, a monitor or a forecaster, or several on the same optimizer.
        layers: Whether to add the readings of each parameter. The monitor must know their names.

    Returns:
        The numbers by name.

    Example:
        >>> import torch
        >>> import equilibrate as eq
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> monitor = eq.Monitor(torch.optim.SGD([theta], lr=0.5))
        >>> theta.grad = torch.tensor([1.0, 0.0])
        >>> monitor.optimizer.step()
        >>> for name, value in eq.scalars(monitor).items():
        ...     print(name, value)
        equilibrate/left 1.0
        equilibrate/right 0.25
        equilibrate/residual 3.0
        equilibrate/count 1.0
        equilibrate/lr 0.5
    """
    row = observe(Sources.of(*sources), layers=layers)
    found = {name: row[name] for name in _SIDES if name in row}
    if "margin" in row:
        found |= {"residual_low": row["residual"] - row["margin"]}
        found |= {"residual_high": row["residual"] + row["margin"], "count": float(row["count"])}
    lrs = row["lrs"]
    same = len(set(lrs)) == 1
    found |= {"lr": lrs[0]} if same else {f"lr/group_{i}": lr for i, lr in enumerate(lrs)}
    if "after" in (forecast := row.get("forecast", {})):
        found |= {f"forecast/{name}": forecast[name] for name in _LOGGED}
    named = {f"equilibrate/{name}": value for name, value in found.items()}
    for layer, parts in row.get("layers", {}).items():
        group = f"equilibrate_layers/{layer}"
        named |= {f"{group}/{name}": parts[name] for name in _SIDES}
        named[f"{group}/angular_step"] = parts.get("angular_step", math.nan)
        named[f"{group}/equilibrium_angular_step"] = parts.get("equilibrium", math.nan)
    return {name: value for name, value in named.items() if math.isfinite(value)}


def _forecast(made: Forecast) -> dict[str, Any]:
    if made.undefined is not None:
        return {"horizon": made.horizon, "undefined": made.undefined}
    return {
        "horizon": made.horizon,
        "now": made.now.value,
        "after": made.after.value,
        "after_margin": made.after.margin,
        "staying": made.staying.value,
        "gain": made.gain.value,
        "gain_margin": made.gain.margin,
        "over_staying": made.over_staying.value,
        "over_staying_margin": made.over_staying.margin,
    }


def forecast_of(row: dict[str, Any]) -> Forecast | None:
    """Return the forecast that a row holds, with what a sentence about it needs.

    Args:
        row: The row, as it was recorded.

    Returns:
        The forecast; None if the row has none. What was not recorded is nan.
    """
    if not (found := row.get("forecast")):
        return None

    def estimate(name: str) -> Estimate:
        value, margin = found.get(name), found.get(f"{name}_margin")
        return Estimate(
            math.nan if value is None else value,
            math.nan,
            margin=math.nan if margin is None else margin,
        )

    names = ("now", "after", "staying", "gain", "over_staying")
    return Forecast(
        found["horizon"],
        row["step"],
        found.get("undefined"),
        **{name: estimate(name) for name in names},
    )


def _layer(layer: Layer) -> dict[str, Any]:
    """Return the row of a layer, short because there may be hundreds of them in each row.

    Numbers have six digits. Those that are not known are left out, except for the sides, and so are
    rotations of weights that are not scale-invariant.
    """
    row = layer.row()
    if not layer.rotation.scale_invariant:
        row = {name: value for name, value in row.items() if name not in layer.OF_ROTATION}
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
        if name in _SIDES or value == value  # nan is not known
    }
