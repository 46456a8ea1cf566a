"""A relation is two sides and an average; a reading is what it says at one moment."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibrate import observables
from equilibrate.averages import HalfRunningMean
from equilibrate.observables import Observable, Scalar, Snapshot


@dataclass(frozen=True, slots=True, repr=False)
class Reading:
    """Both sides of a relation, averaged over a window of steps.

    >>> Reading(step=10, count=5, left=1.02, right=1.0, lr=0.1)
    Reading(step=10, count=5, left=1.02, right=1, lr=0.1, residual=0.02)
    """

    step: int
    """Steps seen in all."""
    count: int
    """Steps averaged over."""
    left: float
    right: float
    lr: float
    """The learning rate at the last step; nan where parameter groups have different ones."""

    @property
    def residual(self) -> float:
        """left/right − 1; nan where that is undefined."""
        return self.left / self.right - 1 if self.undefined is None else math.nan

    @property
    def undefined(self) -> str | None:
        """Why the residual is undefined, or None where it is a number."""
        if self.count == 0:
            return "no step has been seen yet"
        if not (math.isfinite(self.left) and math.isfinite(self.right)):
            return f"non-finite averages (left {self.left:g}, right {self.right:g})"
        if self.right == 0:
            return f"the right side is zero (left {self.left:g}): nothing fluctuates"
        return None

    def __repr__(self) -> str:
        return (
            f"Reading(step={self.step}, count={self.count}, left={self.left:.6g}, "
            f"right={self.right:.6g}, lr={self.lr:.6g}, residual={self.residual:.4g})"
        )


class Relation:
    """⟨left⟩ = ⟨right⟩ at stationarity, followed by an average of both sides.

    >>> relation = fdr1()
    >>> theta = torch.tensor([2.0])
    >>> for g in [1.0, -0.9, 1.0, -0.9]:
    ...     relation.update(Snapshot(theta, torch.tensor([g]), lr=0.1))
    >>> relation.reading()
    Reading(step=4, count=2, left=0.1, right=0.04525, lr=0.1, residual=1.21)
    """

    def __init__(
        self, left: Observable, right: Observable, average: HalfRunningMean | None = None
    ) -> None:
        self.left = left
        self.right = right
        self.average = average if average is not None else HalfRunningMean((2,))
        self._lr: Scalar = math.nan
        self._step = 0

    def update(self, snapshot: Snapshot) -> None:
        """Measure both sides of one step."""
        self.average.update(torch.stack([self.left(snapshot), self.right(snapshot)]))
        self._lr = snapshot.lr
        self._step += 1

    def reading(self) -> Reading:
        """What the relation says now."""
        left, right = self.average.value.tolist()
        return Reading(self._step, self.average.window, left, right, float(self._lr))


def fdr1() -> Relation:
    """FDR1′: ⟨θ·∇f⟩ = (1+μ)/(2(1−ν)) η⟨v²⟩; FDR1 at μ = ν = 0."""
    return Relation(observables.fdr1_left, observables.fdr1_right)


def any_step() -> Relation:
    """The step form −⟨θ·Δ⟩/η = ⟨Δ²⟩/(2η), for any optimizer with θ′ = θ + Δ."""
    return Relation(observables.step_left, observables.step_right)


def telescoped_residual(
    norm_square: tuple[Scalar, Scalar],
    overlap: tuple[Scalar, Scalar],
    steps: int,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
) -> Scalar:
    """The mean of O_L − O_R over `steps` steps from what stands at the two ends alone.

    Σ (O_L − O_R) = [ −(1−μ)(N_T − N_s)/(2η) + μ(θ_s·v_s − θ_T·v_T) ] / (1−ν)

    holds for any loss, sampling and noise while η, μ, ν are constant: FDR1 says that the norm
    has stopped drifting. `norm_square` is (N_s, N_T) and `overlap` (θ_s·v_s, θ_T·v_T).

    One step from θ = 1 with g = 1 at η = ½: O_L = 1, O_R = ¼, and the norm falls from 1 to ¼.

    >>> telescoped_residual((1.0, 0.25), (0.0, 0.0), 1, lr=0.5)
    0.75
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    norm_drift = norm_square[1] - norm_square[0]
    overlap_drift = overlap[1] - overlap[0]
    total = -(1 - momentum) * norm_drift / (2 * lr) - momentum * overlap_drift
    return total / ((1 - dampening) * steps)


def combine(means: list[Tensor]) -> tuple[float, float]:
    """Sum (left, right) over parts, each of shape (2, …): both sides of FDR1 are additive."""
    totals = [mean.reshape(2, -1).sum(1).tolist() for mean in means]
    return sum(left for left, _ in totals), sum(right for _, right in totals)
