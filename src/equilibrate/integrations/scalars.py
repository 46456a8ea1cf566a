"""Turn a monitor or a scheduler into named numbers, which is what loggers take."""

from __future__ import annotations

import math
from typing import Any

from equilibrate.layers import Layer
from equilibrate.monitor import Monitor
from equilibrate.observation import Observation, Observer
from equilibrate.readings import Reading
from equilibrate.scheduler import FDRScheduler

PREFIX = "equilibrate"
"""The first part of the names. Loggers group charts by what stands before the first slash."""
LAYERS_PREFIX = f"{PREFIX}_layers"
"""The first part of the names of layers, whose many charts form a group of their own."""
INTERVAL_PREFIX = f"{PREFIX}_interval"
"""The first part of the names of curves that TensorBoard draws in one chart."""


def scalars(
    source: Monitor | FDRScheduler, *, layers: bool = False, forecaster: Any | None = None
) -> dict[str, float]:
    """Return what a monitor or a scheduler has to say now, as named numbers for a logger.

    | name | value |
    | --- | --- |
    | `equilibrate/left`, `equilibrate/right` | the two sides of FDR1, averaged over the window |
    | `equilibrate/residual` | left/right − 1 |
    | `equilibrate/residual_low`, `…_high` | the ends of its 95 % interval, if they are known |
    | `equilibrate/count` | number of steps in the window |
    | `equilibrate/lr` | the learning rate, if all groups have the same |
    | `equilibrate/lr/group_0` and so on | the learning rate of each group otherwise |
    | `equilibrate/lowered` | schedulers: 1 if the last decision lowered the rate, 0 if not |
    | `equilibrate/forecast/gain_150` and so on | what a cooldown over 150 steps would gain |
    | `equilibrate/forecast/gain_150_margin` | half the width of its 95 % interval |
    | `equilibrate_layers/<name>/left`, `…/right`, `…/residual` | with `layers`: of each parameter |
    | `equilibrate_layers/<name>/angular_step` | of scale-invariant ones: the angle of a step |
    | `equilibrate_layers/<name>/equilibrium_angular_step` | the angle at which its norm rests |

    The sides are those of the current window. Right after a lowering, which restarts the window,
    they are the ones that were judged. Numbers that are undefined or not finite are left out.

    It waits for the device, so call it once in a while. If parameters are sharded, every process
    must call it.

    Args:
        source: The monitor or the scheduler.
        layers: Whether to add the readings of each parameter. The monitor must know their names.
        forecaster: Whose forecasts to add; by default that of the scheduler, if it has one.

    Returns:
        The numbers by name.

    Example:
        >>> import torch
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> monitor = Monitor(torch.optim.SGD([theta], lr=0.5))
        >>> theta.grad = torch.tensor([1.0, 0.0])
        >>> monitor.optimizer.step()
        >>> for name, value in scalars(monitor).items():
        ...     print(name, value)
        equilibrate/left 1.0
        equilibrate/right 0.25
        equilibrate/residual 3.0
        equilibrate/count 1.0
        equilibrate/lr 0.5
    """
    observer = Observer(source, layers=layers, forecaster=forecaster)
    seen = observer.observe()
    lowered = None if seen.decision is None else seen.decision.lowered
    return named_numbers(seen, lowered)


def named_numbers(seen: Observation, lowered: bool | None) -> dict[str, float]:
    """Return the numbers of an observation by the names that `scalars` uses.

    Args:
        seen: The observation.
        lowered: Whether the learning rate was lowered; None if there is no scheduler.

    Returns:
        The numbers by name.
    """
    reading = seen.reading
    found = _sides(reading)
    found |= {"residual_low": reading.interval[0], "residual_high": reading.interval[1]}
    found["count"] = float(reading.count)
    found |= _learning_rates(seen.lrs)
    if lowered is not None:
        found["lowered"] = float(lowered)
    for forecast in seen.forecasts:
        name = f"forecast/gain_{forecast.horizon}"
        found |= {name: forecast.gain.value, f"{name}_margin": forecast.gain.margin}
    named = {f"{PREFIX}/{name}": value for name, value in found.items()}
    for name, layer in seen.layers.items():
        named |= {f"{LAYERS_PREFIX}/{name}/{part}": v for part, v in _of_layer(layer).items()}
    return {name: value for name, value in named.items() if math.isfinite(value)}


def of_optimizer(name: str, index: int) -> str:
    """Return the name of a number that belongs to one of several optimizers.

    >>> of_optimizer("equilibrate/lr", 1)
    'equilibrate/optimizer_1/lr'

    Args:
        name: The name without it.
        index: Which optimizer it is.

    Returns:
        The name, in the same group of charts.
    """
    group, _, rest = name.partition("/")
    return f"{group}/optimizer_{index}/{rest}"


def _of_layer(layer: Layer) -> dict[str, float]:
    found = _sides(layer.reading)
    if layer.rotation.scale_invariant:
        found["angular_step"] = layer.rotation.angular_step
        found["equilibrium_angular_step"] = layer.rotation.equilibrium
    return found


def _sides(reading: Reading) -> dict[str, float]:
    return {"left": reading.left, "right": reading.right, "residual": reading.residual}


def _learning_rates(lrs: tuple[float, ...]) -> dict[str, float]:
    if len(set(lrs)) == 1:
        return {"lr": lrs[0]}
    return {f"lr/group_{i}": lr for i, lr in enumerate(lrs)}
