"""Which relation the steps of an optimizer obey: FDR1 with momentum, or the step form."""

from __future__ import annotations

import inspect
from functools import cache
from typing import NamedTuple

import torch
from torch.optim import SGD, Optimizer

from equilibrate.watching.rates import Group, Scalar, learning_rate


class Update(NamedTuple):
    """The relation that the steps of a group obey: FDR1 with momentum, or the step form."""

    lr: Scalar
    momentum: float = 0.0
    dampening: float = 0.0


def update_of(optimizer: Optimizer, group: Group, dtype: torch.dtype) -> Update:
    """Return the relation that the optimizer obeys for parameters of one dtype in one group.

    Nesterov momentum, a dampening of 1, and parameters of half precision, which move by the
    rounded step, are read through the step form.
    """
    lr = learning_rate(group)
    exact = dtype in (torch.float32, torch.float64)
    if not (exact and steps_as_sgd(type(optimizer))) or group["nesterov"]:
        return Update(lr)
    if not group["momentum"] or group["dampening"] == 1:
        return Update(lr)
    return Update(lr, group["momentum"], group["dampening"])


@cache
def steps_as_sgd(kind: type[Optimizer]) -> bool:
    """Return whether a class of optimizers makes the steps of `torch.optim.SGD`."""
    return issubclass(kind, SGD) and inspect.unwrap(kind.step) is inspect.unwrap(SGD.step)
