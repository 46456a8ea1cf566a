"""Torch's update conventions in one place: along which vector one step moves the parameters.

A step is θ′ = θ − ηd. Everything is read *after* the step, so closures, clipping in other hooks
and unscaling inside fused kernels are seen as the optimizer saw them. For `torch.optim.SGD`, whose
buffer is b = −v, d follows from tensors that exist anyway:

- without momentum d = w = ±g + λθ, hence d = κ(±g + λθ′) with κ = 1/(1 − ηλ);
- with momentum b′ = μb + (1−ν)w (the first step is undampened, b′ = w), and d = b′;
- with Nesterov momentum d = w + μb′ = κ(±g + λθ′ + μb′).

For any other optimizer d = (θ − θ′)/η needs a copy of θ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from equilibrate._engine.optimizer.rates import identity

Group = dict[str, Any]
Scalar = float | Tensor
Source = Literal["gradient", "buffer", "both", "difference"]

_SETTINGS = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
_SINGULAR = 0.1
"""Where |1 − ηλ| is smaller, κ amplifies rounding errors too much and a copy of θ is used."""


@dataclass(frozen=True, slots=True)
class Update:
    """The direction d of a step θ′ = θ − ηd, and the relation that it obeys.

    With `momentum` μ > 0 the relation is FDR1 with momentum, for which d = b′ = −v′. Otherwise it
    is the step form ⟨θ·d⟩ = (η/2)⟨d²⟩, which without momentum is FDR1 itself.
    """

    source: Source
    """The tensors that d is computed from."""
    lr: Scalar
    momentum: float = 0.0
    dampening: float = 0.0
    gradient: float = 0.0
    """Coefficient of g in d."""
    parameters: float = 0.0
    """Coefficient of θ′ in d."""
    buffer: float = 0.0
    """Coefficient of b′ in d."""

    def continues(self, other: Update, tolerance: float = 0.01) -> bool:
        """Return whether the two may share an interval of steps between two measurements.

        Inside an interval the settings are taken as constant, so they may differ by `tolerance` at
        most; a learning rate tensor may not differ at all, since comparing it would wait for the
        device.
        """
        if (self.momentum > 0) != (other.momentum > 0):
            return False
        pairs = [
            (1 - self.momentum, 1 - other.momentum),
            (1 - self.dampening, 1 - other.dampening),
        ]
        if not isinstance(self.lr, Tensor) and not isinstance(other.lr, Tensor):
            pairs.append((self.lr, other.lr))
        elif self.lr is not other.lr:
            return False
        return all(abs(a - b) <= tolerance * abs(b) for a, b in pairs)


def settings_getter(optimizer: Optimizer, group: Group) -> Callable[[Group], Hashable]:
    """Return a function of a group whose value changes when an update depends on the change.

    It is called at every step. A learning rate tensor is changed in place, which its version
    counter shows. For optimizers other than SGD all other settings may be anything: a tensor, say,
    whose comparison would wait.
    """
    if "lr" not in group:
        return lambda group: None
    names = _SETTINGS if steps_as_sgd(type(optimizer)) else ()
    getter = itemgetter("lr", *names)
    if not isinstance(group["lr"], Tensor):
        return getter  # if it becomes a tensor, the two are compared once, and that waits

    def settings(group: Group) -> Hashable:
        lr = group["lr"]
        if isinstance(lr, Tensor):
            return (identity(lr), *(group[name] for name in names))
        return getter(group)

    return settings


def update_of(optimizer: Optimizer, group: Group, dtype: torch.dtype) -> Update:
    """Return how the optimizer moves parameters of one dtype in one group, as it is set now."""
    lr = learning_rate(group)
    difference = Update("difference", lr)
    # Parameters of half precision move by the rounded step, which only a copy of them shows.
    if not steps_as_sgd(type(optimizer)) or dtype not in (torch.float32, torch.float64):
        return difference
    momentum, nesterov = group["momentum"], group["nesterov"]
    if momentum and not nesterov:
        if group["dampening"] == 1:  # no gradient reaches the velocity, and 1/(1−ν) diverges
            return difference
        return Update("buffer", lr, momentum, group["dampening"], buffer=1.0)
    decay = group["weight_decay"]
    shrink = 1 - float(lr) * decay if decay and not isinstance(lr, Tensor) else 1.0
    if (isinstance(lr, Tensor) and decay) or abs(shrink) < _SINGULAR:
        return difference
    sign = -1.0 if group["maximize"] else 1.0
    return Update(
        "both" if momentum else "gradient",
        lr,
        gradient=sign / shrink,
        parameters=decay / shrink,
        buffer=momentum / shrink,
    )


def learning_rate(group: Group) -> Scalar:
    """Return η of a group as a number, or as a float64 copy of a tensor; 1 if it has none."""
    lr = group.get("lr")
    if isinstance(lr, Tensor):
        return lr.detach().to(torch.float64, copy=True).reshape(())
    return 1.0 if lr is None else lr


@cache
def steps_as_sgd(kind: type[Optimizer]) -> bool:
    """Return whether a class of optimizers makes the steps of `torch.optim.SGD`."""
    return issubclass(kind, SGD) and inspect.unwrap(kind.step) is inspect.unwrap(SGD.step)


def settings_to_tensor(updates: Sequence[Update | None]) -> Tensor:
    """Return the settings that an interval depends on, in a shape that is always the same."""
    rows = [(u.lr, u.momentum, u.dampening) if u else (0.0,) * 3 for u in updates]
    numbers = [[float(value) for value in row] for row in rows]
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def settings_from_tensor(settings: Tensor) -> list[Update]:
    """Return updates that continue an interval; what else they hold is known at the next step."""
    return [
        Update("buffer", lr, momentum, dampening, buffer=1.0)
        if momentum
        else Update("difference", lr)
        for lr, momentum, dampening in settings.tolist()
    ]
