"""How weight decay of torch's optimizers acts on the norm of the parameters, as they are set."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import cache

from torch import optim
from torch.optim import Adam, Optimizer

from equilibrate.monitor.updates import steps_as_sgd
from equilibrate.scale_invariance import (
    adamw_angular_step,
    adamw_relaxation,
    sgd_angular_step,
    sgd_relaxation,
)
from equilibrate.watching.rates import Group, learning_rate

_MUON: tuple[type, ...] = tuple(filter(None, [getattr(optim, "Muon", None)]))
"""Empty in versions of torch that do not have it."""


@dataclass(frozen=True, slots=True)
class WeightDecay:
    """How weight decay acts on one parameter group."""

    rate: float
    """lr × weight_decay, over 1 − momentum if there is momentum; nan if it is not known."""
    relaxation: float
    """Steps in which the norm of a scale-invariant layer relaxes; infinite without weight decay,
    nan if it is not known."""
    formula: str = "lr × weight_decay"
    """What `rate` is."""


def weight_decay_of(optimizer: Optimizer, group: Group) -> WeightDecay:
    """Return how fast weight decay relaxes the norms of a group, as it is set now.

    It is known for SGD, and for optimizers whose weight decay is decoupled and whose steps do not
    depend on the scale of the gradient. For others, such as Adam with an L2 term, weight decay is
    divided by the size of the gradient.
    """
    unknown = WeightDecay(math.nan, math.nan)
    weight_decay = group.get("weight_decay", 0.0)
    if not isinstance(weight_decay, int | float):
        return unknown
    lr = float(learning_rate(group))
    rate = lr * weight_decay
    if not rate > 0:
        return WeightDecay(0.0, math.inf)
    if steps_as_sgd(type(optimizer)):
        momentum = group["momentum"]
        if not momentum:
            return WeightDecay(rate, sgd_relaxation(lr, weight_decay))
        dampening = group["dampening"]
        relaxation = sgd_relaxation(lr, weight_decay, momentum, dampening)
        formula = "lr × weight_decay / (1 − momentum)"
        if dampening:
            formula = "lr × weight_decay × (1 − dampening) / (1 − momentum)"
        return WeightDecay(rate * (1 - dampening) / (1 - momentum), relaxation, formula)
    if group.get("decoupled_weight_decay") or isinstance(optimizer, _MUON):
        return WeightDecay(rate, adamw_relaxation(lr, weight_decay))
    return unknown


def angular_step_of(optimizer: Optimizer, group: Group, lr: float) -> float:
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
