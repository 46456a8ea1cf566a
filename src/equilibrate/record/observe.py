"""What monitors, forecasters and schedulers say at one moment, for records and loggers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from equilibrate.monitor.layers import Layer

_SIDES = ("left", "right", "residual")


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
            kinds = {"monitor": "reading", "forecaster": "forecasts", "scheduler": "last_decision"}
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
    if sources.forecaster is not None:
        row["forecasts"] = [_forecast(made) for made in sources.forecaster.forecasts()]
    return row


def scalars(*sources: Any, layers: bool = False) -> dict[str, float]:
    """Return what there is to say now as named numbers, for a logger.

    | name | value |
    | --- | --- |
    | `equilibrate/left`, `equilibrate/right` | the two sides of FDR1, averaged over the window |
    | `equilibrate/residual` | left/right − 1 |
    | `equilibrate/residual_low`, `…_high` | the ends of its 95 % interval, if they are known |
    | `equilibrate/count` | number of steps in the window |
    | `equilibrate/lr` | the learning rate, if all groups have the same |
    | `equilibrate/lr/group_0` and so on | the learning rate of each group otherwise |
    | `equilibrate/forecast/gain_150` and so on | what a cooldown over 150 steps would gain |
    | `equilibrate/forecast/gain_150_margin` | half the width of its 95 % interval |
    | `equilibrate_layers/<name>/left`, `…/right`, `…/residual` | with `layers`: of each parameter |
    | `equilibrate_layers/<name>/angular_step` | of scale-invariant ones: the angle of a step |
    | `equilibrate_layers/<name>/equilibrium_angular_step` | the angle at which its norm rests |

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
    for forecast in row.get("forecasts", ()):
        name = f"forecast/gain_{forecast['horizon']}"
        found |= {name: forecast["gain"], f"{name}_margin": forecast["margin"]}
    named = {f"equilibrate/{name}": value for name, value in found.items()}
    for layer, parts in row.get("layers", {}).items():
        group = f"equilibrate_layers/{layer}"
        named |= {f"{group}/{name}": parts[name] for name in _SIDES}
        named[f"{group}/angular_step"] = parts.get("angular_step", math.nan)
        named[f"{group}/equilibrium_angular_step"] = parts.get("equilibrium", math.nan)
    return {name: value for name, value in named.items() if math.isfinite(value)}


def _forecast(forecast: Any) -> dict[str, Any]:
    gain = forecast.gain
    found = {"horizon": forecast.horizon, "gain": gain.value}
    found |= {"stderr": gain.stderr, "margin": gain.margin}
    return found if forecast.undefined is None else {**found, "undefined": forecast.undefined}


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
