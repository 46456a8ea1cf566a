"""From averages and the settings of the optimizer to the rotation of each parameter."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from functools import cache

from torch.optim import Adam, Optimizer

from equilibrate._engine.optimizer.decay import decay_of
from equilibrate._engine.optimizer.updates import Group, steps_as_sgd
from equilibrate._engine.relation.totals import Totals
from equilibrate.scale_invariance import (
    Rotation,
    adamw_angular_step,
    is_scale_invariant,
    sgd_angular_step,
)


def rotations(part: Totals, optimizer: Optimizer, group: Group, lr: float) -> Iterator[Rotation]:
    """Yield the rotation of each parameter of a probe.

    Args:
        part: Its averages, with norms.
        optimizer: The optimizer.
        group: Its parameter group.
        lr: The learning rate of the last measured step.
    """
    equilibrium = _angular_step(optimizer, group, lr)
    relaxation = decay_of(optimizer, group).relaxation
    columns = zip(part.norms, part.relative_steps, part.alignments, strict=True)
    for norm, step, (alignment, samples) in columns:
        decay = math.nan if math.isnan(equilibrium) else group["weight_decay"] * norm
        slower = steps_as_sgd(type(optimizer)) and not is_scale_invariant(alignment, samples)
        yield Rotation(
            alignment, samples, step, equilibrium, decay, 2 * relaxation if slower else relaxation
        )


def _angular_step(optimizer: Optimizer, group: Group, lr: float) -> float:
    """Return the equilibrium angular step of a scale-invariant weight; nan if it is not known."""
    kind, decay = type(optimizer), group.get("weight_decay")
    if not isinstance(decay, int | float) or not math.isfinite(lr):
        return math.nan
    if steps_as_sgd(kind):
        momentum = group["momentum"]
        dampening = group["dampening"] if momentum else 0.0  # torch ignores it without momentum
        return sgd_angular_step(lr, decay, momentum, dampening, nesterov=group["nesterov"])
    if _steps_as_adam(kind) and (group.get("decoupled_weight_decay") or not decay):
        return adamw_angular_step(lr, decay, float(group["betas"][0]))
    return math.nan


@cache
def _steps_as_adam(kind: type[Optimizer]) -> bool:
    return issubclass(kind, Adam) and inspect.unwrap(kind.step) is inspect.unwrap(Adam.step)
