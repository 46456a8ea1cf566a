"""What an ensemble hands out: numbers on the host, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Epoch:
    """What one epoch measured at each step of each replica: float64 (steps, R) on the host."""

    epoch: int
    """Epochs done in all, this one included."""
    step: int
    """Steps done in all."""
    lr: tuple[float, ...]
    left: Tensor
    """θ·∇f^B (for Adam −θ·Δ/η)."""
    right: Tensor
    """(1+μ)/(2(1−ν)) η v′² (for Adam Δ²/(2η))."""
    loss: Tensor
    """Loss of the mini-batch before the step, without the L2 term."""
    velocity_gradient: Tensor
    """v·∇f^B with the velocity *before* the step; zero where there is no momentum."""

    @property
    def mean_loss(self) -> list[float]:
        """Mini-batch loss of each replica, averaged over the epoch."""
        return self.loss.mean(0).tolist()

    def __repr__(self) -> str:
        return f"Epoch(epoch={self.epoch}, step={self.step}, mean_loss={self.mean_loss})"


class Averages(NamedTuple):
    """Half-running averages of one replica, of what `Epoch` holds; nan before the first step."""

    left: float
    right: float
    loss: float
    velocity_gradient: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss and accuracy of each replica on a whole data set."""

    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
