"""Results of an ensemble: frozen values on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Epoch:
    """Measurements of one epoch, at each step of each replica: float64 (steps, R) on the host."""

    epoch: int
    """Epochs completed so far, including this one."""
    step: int
    """Steps completed so far."""
    lr: tuple[float, ...]
    """Learning rate of each replica in this epoch."""
    left: Tensor
    """Left side of FDR1, θ·∇f^B (for Adam −θ·Δ/η)."""
    right: Tensor
    """Right side of FDR1, (1+μ)/(2(1−ν)) η v′² (for Adam Δ²/(2η))."""
    loss: Tensor
    """Loss of the mini-batch before the step, without the L2 term."""
    velocity_gradient: Tensor
    """v·∇f^B with the velocity *before* the step; zero without momentum."""


class Averages(NamedTuple):
    """Half-running averages of the columns of `Epoch`, for one replica; nan before any step."""

    left: float
    """Average of `Epoch.left`."""
    right: float
    """Average of `Epoch.right`."""
    loss: float
    """Average of `Epoch.loss`."""
    velocity_gradient: float
    """Average of `Epoch.velocity_gradient`."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss and accuracy on a whole data set."""

    loss: list[float]
    """Loss of each replica."""
    accuracy: list[float]
    """Fraction of correct predictions of each replica."""
