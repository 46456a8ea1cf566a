"""Learning rates and other settings of parameter groups: compared, read, set and bounded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from numbers import Real
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]
Scalar = float | Tensor
_TOLERANCE = 0.2
"""By which share learning rates may differ and still count as the same."""


def identity(lr: Any) -> Hashable:
    """Return what changes if a learning rate does: its value, or the version of a tensor.

    A tensor is changed in place, and comparing its value would wait for the device.
    """
    return (id(lr), lr._version) if isinstance(lr, Tensor) else lr


def learning_rate(group: Group) -> Scalar:
    """Return η of a group as a number, or as a float64 copy of a tensor; 1 if it has none."""
    lr = group.get("lr")
    if isinstance(lr, Tensor):
        return lr.detach().to(torch.float64, copy=True).reshape(())
    return 1.0 if lr is None else lr


def constant_since(changes: Iterable[Sequence[float]]) -> int:
    """Return the step since which learning rates are those of the present, or within 20 % of them.

    Args:
        changes: A step at which they changed, and the rates from there on, one row after the other.
    """
    since, now = 0, None
    for step, *lrs in reversed(list(changes)):
        now = now or lrs
        if len(lrs) != len(now) or not all(map(_is_close, lrs, now)):
            break
        since = int(step)
    return since


def _is_close(lr: float, now: float) -> bool:
    return abs(lr - now) <= _TOLERANCE * abs(now)


def settings_getter(group: Group, names: Iterable[str]) -> Callable[[Group], Hashable]:
    """Return a function of a group whose value changes when one of its settings does.

    It is called at every step. A learning rate tensor is changed in place, which its version
    counter shows.

    Args:
        group: A parameter group.
        names: Which settings.
    """
    names = tuple(names)
    if not isinstance(group.get("lr"), Tensor):
        # If the rate becomes a tensor later, the two are compared once, and that waits.
        return itemgetter(*names) if names else lambda group: None
    return lambda group: tuple(identity(group[name]) for name in names)


def read_lrs(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each group; it waits for tensors on a device."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def write_lrs(optimizer: Optimizer, lrs: Sequence[float]) -> None:
    """Set the learning rate of each group; a tensor is changed in place."""
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = float(lr)


def check_min_lr(optimizer: Optimizer, min_lr: float | Sequence[float]) -> float | list[float]:
    """Check a lower bound on the learning rates, and warn if it lies above one of them.

    Args:
        optimizer: The optimizer.
        min_lr: One number for all groups, or one for each.

    Returns:
        The same as a float, or as a list of them.

    Raises:
        ValueError: If their number is wrong, or one is negative or not a number.
    """
    groups = len(optimizer.param_groups)
    given: Any = [min_lr] * groups if isinstance(min_lr, Real) else min_lr
    try:
        values = [] if isinstance(given, str | Mapping) else list(map(float, given))
    except (TypeError, ValueError):  # not a number, nor several
        values = []
    if len(values) != groups or not all(low >= 0 for low in values):
        raise ValueError(
            f"min_lr must be one number ≥ 0, or one for each of the {groups} parameter group(s), "
            f"got {min_lr!r}"
        )
    for i, (group, low) in enumerate(zip(optimizer.param_groups, values, strict=True)):
        # A warm-up that was created before may begin below it, and a group may be frozen.
        if low > (lr := float(group.get("initial_lr", group["lr"]))) > 0:
            warnings.warn(
                f"min_lr={low:g} is above the learning rate {lr:g} of parameter group {i}, which "
                "therefore never falls: pass a lower one, or one for each group",
                stacklevel=3,
            )
    return values[0] if isinstance(min_lr, Real) else values


def lower_bounds(optimizer: Optimizer, min_lr: float | list[float]) -> list[float]:
    """Return the lower bound of each group: 0 for groups that were added since they were given."""
    groups = len(optimizer.param_groups)
    bounds = min_lr if isinstance(min_lr, list) else [min_lr] * groups
    return [*bounds, *[0.0] * groups][:groups]
