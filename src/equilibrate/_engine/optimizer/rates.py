"""Reads the learning rates of an optimizer, and checks lower bounds on them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def identity(lr: Any) -> Hashable:
    """Return what changes if a learning rate does: its value, or the version of a tensor.

    A tensor is changed in place, and comparing its value would wait for the device.
    """
    return (id(lr), lr._version) if isinstance(lr, Tensor) else lr


class LearningRates:
    """Reads learning rates, and waits for tensors only if somebody else has changed them.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.forget()

    def read(self) -> list[float]:
        """Return the learning rate of each group."""
        if self._known and self._identities == self._identify():
            return list(self._known)
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def note(self, lrs: Sequence[float]) -> None:
        """Take note of learning rates that have just been set."""
        self._known, self._identities = list(lrs), self._identify()

    def forget(self) -> None:
        """Forget what was set."""
        self._known: list[float] = []
        self._identities: list[Hashable] = []

    def _identify(self) -> list[Hashable]:
        return [identity(group["lr"]) for group in self._optimizer.param_groups]


def lower_bounds(optimizer: Optimizer, min_lr: float | Sequence[float]) -> tuple[float, ...]:
    """Return the lower bound on the learning rate of each group.

    Args:
        optimizer: The optimizer.
        min_lr: One number for all groups, or one for each.

    Returns:
        A number for each group.

    Raises:
        ValueError: If their number is wrong, or one is negative or not a number.
    """
    groups = len(optimizer.param_groups)
    try:
        given = [min_lr] * groups if isinstance(min_lr, int | float | Real) else min_lr
        values = tuple(float(low) for low in given)
    except (TypeError, ValueError):  # not a number, nor several
        values = ()
    if len(values) != groups or not all(low >= 0 for low in values):
        raise ValueError(
            f"min_lr must be one number ≥ 0, or one for each of the {groups} parameter group(s), "
            f"got {min_lr!r}"
        )
    return values
