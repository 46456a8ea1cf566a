"""Reads the learning rates of an optimizer, and checks lower bounds on them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
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
        self.note([float(group["lr"]) for group in self._optimizer.param_groups])
        return list(self._known)

    def note(self, lrs: Sequence[float]) -> None:
        """Take note of learning rates that have just been set."""
        groups = self._optimizer.param_groups
        self._held = [group["lr"] for group in groups]  # so that no other gets their identity
        self._known = [_as_stored(lr, held) for lr, held in zip(lrs, self._held, strict=True)]
        self._identities = self._identify()

    def kept(self, lrs: Sequence[float]) -> AbstractContextManager[None]:
        """Return a block in which torch sets learning rates; the same ones are not a change."""
        rates = (group["lr"] for group in self._optimizer.param_groups)
        tensors = tuple(lr for lr in rates if isinstance(lr, Tensor))
        if not tensors or list(lrs) != self.read():
            return nullcontext()
        return _unsafe_preserve_version_counter(tensors)

    def forget(self) -> None:
        """Forget what was set."""
        self._known: list[float] = []
        self._identities: list[Hashable] = []

    def _identify(self) -> list[Hashable]:
        return [identity(group["lr"]) for group in self._optimizer.param_groups]


def _as_stored(value: float, lr: Any) -> float:
    """Return a number as a learning rate holds it: a tensor has rounded it."""
    if not isinstance(lr, Tensor):
        return value
    (stored,) = torch.tensor([value], dtype=lr.dtype, device="cpu").tolist()
    return stored


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
    given: Any = [min_lr] * groups if isinstance(min_lr, Real) else min_lr
    try:
        values = () if isinstance(given, str | Mapping) else tuple(map(float, given))
    except (TypeError, ValueError):  # not a number, nor several
        values = ()
    if len(values) != groups or not all(low >= 0 for low in values):
        raise ValueError(
            f"min_lr must be one number ≥ 0, or one for each of the {groups} parameter group(s), "
            f"got {min_lr!r}"
        )
    return values
