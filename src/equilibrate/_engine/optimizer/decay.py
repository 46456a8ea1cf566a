"""How weight decay of torch's optimizers acts on the norm of the parameters."""

from __future__ import annotations

import math

from torch import optim
from torch.optim import Optimizer

from equilibrate._engine.optimizer.updates import Group, learning_rate, steps_as_sgd
from equilibrate.outlook import Decay
from equilibrate.scale_invariance import adamw_relaxation, sgd_relaxation

_MUON: tuple[type, ...] = tuple(filter(None, [getattr(optim, "Muon", None)]))
"""Empty in versions of torch that do not have it."""
_UNKNOWN = Decay(math.nan, math.nan)


def decay_of(optimizer: Optimizer, group: Group) -> Decay:
    """Return how fast weight decay relaxes the norms of a group, as it is set now.

    It is known for SGD, and for optimizers whose weight decay is decoupled and whose steps do not
    depend on the scale of the gradient. For others, such as Adam with an L2 term, weight decay is
    divided by the size of the gradient.
    """
    weight_decay = group.get("weight_decay", 0.0)
    if not isinstance(weight_decay, int | float):
        return _UNKNOWN
    lr = float(learning_rate(group))
    rate = lr * weight_decay
    if not rate > 0:
        return Decay(0.0, math.inf)
    if steps_as_sgd(type(optimizer)):
        momentum = group["momentum"]
        if not momentum:
            return Decay(rate, sgd_relaxation(lr, weight_decay))
        dampening = group["dampening"]
        relaxation = sgd_relaxation(lr, weight_decay, momentum, dampening)
        formula = "lr × weight_decay / (1 − momentum)"
        if dampening:
            formula = "lr × weight_decay × (1 − dampening) / (1 − momentum)"
        return Decay(rate * (1 - dampening) / (1 - momentum), relaxation, formula)
    if group.get("decoupled_weight_decay") or isinstance(optimizer, _MUON):
        return Decay(rate, adamw_relaxation(lr, weight_decay))
    return _UNKNOWN
