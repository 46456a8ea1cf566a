"""What can be measured at one step of SGD: pure functions of a frozen `Snapshot`.

Vectors are flat, with the parameters on the last axis; any leading axes (replicas, say) are kept,
so that a function written for one run serves a whole ensemble.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Scalar = float | Tensor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One step of SGD: v′ = μv − (1−ν)g, θ′ = θ + ηv′.

    `parameters` θ and `gradient` g = ∇f^B are taken before the step and `velocity` v′ after it.
    The gradient is that of the whole loss, with the L2 term λθ counted in. Without momentum
    (`velocity=None`) v′ = −(1−ν)g.

    >>> s = Snapshot(torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.5]), lr=0.1)
    >>> float(fdr1_left(s))
    -0.5
    """

    parameters: Tensor
    gradient: Tensor
    velocity: Tensor | None = None
    lr: Scalar = 0.0
    momentum: Scalar = 0.0
    dampening: Scalar = 0.0

    @property
    def velocity_after(self) -> Tensor:
        """v′, the velocity with which the step is made."""
        if self.velocity is None:
            return -(1 - self.dampening) * self.gradient
        return self.velocity


Observable = Callable[[Snapshot], Tensor]


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last axis, handed on in double precision for the sums over time.

    >>> inner(torch.ones(3, 4), torch.ones(3, 4)).tolist()
    [4.0, 4.0, 4.0]
    """
    return torch.linalg.vecdot(a, b).double()


def fdr1_coefficient(lr: Scalar, momentum: Scalar = 0.0, dampening: Scalar = 0.0) -> Scalar:
    """(1+μ)/(2(1−ν)) η, what stands before ⟨v²⟩ in FDR1′.

    >>> fdr1_coefficient(0.1)
    0.05
    """
    return lr * (1 + momentum) / (2 * (1 - dampening))


def fdr1_left(s: Snapshot) -> Tensor:
    """O_L = θ·∇f^B, the left side of FDR1 and FDR1′."""
    return inner(s.parameters, s.gradient)


def fdr1_right(s: Snapshot) -> Tensor:
    """O_R = (1+μ)/(2(1−ν)) η v′², the right side of FDR1′ (of FDR1 at μ = ν = 0).

    The velocity is the one *after* the step: only then does the residual telescope
    (`relations.telescoped_residual`).
    """
    v = s.velocity_after
    return fdr1_coefficient(s.lr, s.momentum, s.dampening) * inner(v, v)


def norm_square(s: Snapshot) -> Tensor:
    """N = |θ|² before the step; FDR1 says that its mean has stopped drifting."""
    return inner(s.parameters, s.parameters)


def overlap(s: Snapshot) -> Tensor:
    """θ·v′, which with N closes the telescoped form of FDR1′ (θ before, v after the step)."""
    return inner(s.parameters, s.velocity_after)


def step_left(s: Snapshot) -> Tensor:
    """−θ·Δ/η, the left side of the step form 2⟨θ·Δ⟩ + ⟨Δ²⟩ = 0 over 2η, Δ = ηv′.

    It holds for any optimizer, `velocity` being Δ/η whatever made it. For SGD without momentum
    it is FDR1 itself.
    """
    return -inner(s.parameters, s.velocity_after)


def step_right(s: Snapshot) -> Tensor:
    """Δ²/(2η), the right side of the step form."""
    v = s.velocity_after
    return s.lr * inner(v, v) / 2
