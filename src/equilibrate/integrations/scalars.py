"""Turn a monitor or a scheduler into named numbers, which is what loggers take."""

from __future__ import annotations

import math
from typing import Any

from equilibrate.monitor import Monitor
from equilibrate.observation import Observation, Observer
from equilibrate.readings import Reading
from equilibrate.scheduler import FDRScheduler

PREFIX = "equilibrate"
"""The first part of every name, by which loggers group the charts."""


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
    | `equilibrate/layers/<name>/left`, `…/right`, `…/residual` | with `layers`: of each parameter |

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
    for name, of_layer in seen.layers.items():
        found |= {f"layers/{name}/{side}": value for side, value in _sides(of_layer).items()}
    return {f"{PREFIX}/{name}": value for name, value in found.items() if math.isfinite(value)}


def _sides(reading: Reading) -> dict[str, float]:
    return {"left": reading.left, "right": reading.right, "residual": reading.residual}


def _learning_rates(lrs: tuple[float, ...]) -> dict[str, float]:
    if len(set(lrs)) == 1:
        return {"lr": lrs[0]}
    return {f"lr/group_{i}": lr for i, lr in enumerate(lrs)}
