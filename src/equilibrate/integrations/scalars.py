"""Turn a monitor or a scheduler into named numbers, which is what loggers take."""

from __future__ import annotations

import math

from equilibrate.monitor import Monitor
from equilibrate.readings import Reading
from equilibrate.scheduler import FDRScheduler

PREFIX = "equilibrate"
"""The first part of every name, by which loggers group the charts."""


def scalars(source: Monitor | FDRScheduler, *, layers: bool = False) -> dict[str, float]:
    """Return what a monitor or a scheduler has to say now, as named numbers for a logger.

    | name | value |
    | --- | --- |
    | `equilibrate/left`, `equilibrate/right` | the two sides of FDR1, averaged over the window |
    | `equilibrate/residual` | left/right − 1 |
    | `equilibrate/count` | number of steps in the window |
    | `equilibrate/lr` | the learning rate, if all groups have the same |
    | `equilibrate/lr/group_0` and so on | the learning rate of each group otherwise |
    | `equilibrate/lowered` | schedulers: 1 if the last decision lowered the rate, 0 if not |
    | `equilibrate/layers/<name>/left`, `…/right`, `…/residual` | with `layers`: of each parameter |

    The sides are those of the current window. Right after a lowering, which restarts the window,
    they are the ones that were judged. Numbers that are undefined or not finite are left out.

    It waits for the device, so call it once in a while. If parameters are sharded, every process
    must call it.

    Args:
        source: The monitor or the scheduler.
        layers: Whether to add the readings of each parameter. The monitor must know their names.

    Returns:
        The numbers by name.

    Raises:
        TypeError: If `source` is neither a monitor nor a scheduler.

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
    monitor = source.monitor if isinstance(source, FDRScheduler) else source
    if not isinstance(monitor, Monitor):
        raise TypeError(
            f"source must be an eq.Monitor or an eq.FDRScheduler, got {type(source).__name__}"
        )
    reading = monitor.reading()
    if isinstance(source, FDRScheduler) and not reading.count:
        reading = source.last_decision.reading
    found = _sides(reading)
    found["count"] = float(reading.count)
    found |= _learning_rates(monitor)
    if isinstance(source, FDRScheduler):
        found["lowered"] = float(source.last_decision.lowered)
    if layers:
        for name, of_parameter in monitor.parameter_readings().items():
            sides = _sides(of_parameter)
            found |= {f"layers/{name}/{side}": value for side, value in sides.items()}
    return {f"{PREFIX}/{name}": value for name, value in found.items() if math.isfinite(value)}


def _sides(reading: Reading) -> dict[str, float]:
    return {"left": reading.left, "right": reading.right, "residual": reading.residual}


def _learning_rates(monitor: Monitor) -> dict[str, float]:
    groups = monitor.optimizer.param_groups
    lrs = [float(group["lr"]) for group in groups if group.get("lr") is not None]
    if len(set(lrs)) == 1 and len(lrs) == len(groups):
        return {"lr": lrs[0]}
    return {
        f"lr/group_{i}": float(group["lr"])
        for i, group in enumerate(groups)
        if group.get("lr") is not None
    }
