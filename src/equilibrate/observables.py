"""Observables of one step of SGD: pure functions of a frozen `Snapshot`.

Vectors are flat, with the parameters on the last axis. Leading axes, such as replicas, are kept, so
a function written for one run also works for an ensemble. Every observable is returned in double
precision with the shape of the leading axes.

In the formulas θ and v are the parameters and the velocity before the step, θ′ and v′ those after
it, g = ∇f^B is the mini-batch gradient and ∇f the full-batch gradient; η is the learning rate, μ
the momentum and ν the dampening.
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

    Settings that differ among replicas are tensors over the leading axes.

    Example:
        >>> s = Snapshot(torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.5]), lr=0.1)
        >>> float(fdr1_left(s))
        -0.5
    """

    parameters: Tensor
    """θ before the step."""
    gradient: Tensor
    """g = ∇f^B at θ, the gradient of the whole loss: it includes the L2 term λθ."""
    velocity: Tensor | None = None
    """v′ after the step; None for SGD without momentum, where v′ = −(1−ν)g."""
    lr: Scalar = 0.0
    """η."""
    momentum: Scalar = 0.0
    """μ."""
    dampening: Scalar = 0.0
    """ν."""
    velocity_before: Tensor | None = None
    """v before the step. Only the self-checks need it; elsewhere μv is computed as v′ + (1−ν)g."""

    @property
    def velocity_after(self) -> Tensor:
        """v′, the velocity that moves the parameters."""
        return -self.gradient_term if self.velocity is None else self.velocity

    @property
    def parameters_after(self) -> Tensor:
        """θ′ = θ + ηv′."""
        return self.parameters + _over_parameters(self.lr) * self.velocity_after

    @property
    def gradient_term(self) -> Tensor:
        """(1−ν)g, the gradient's part of the update of the velocity."""
        return _over_parameters(1 - self.dampening) * self.gradient

    @property
    def momentum_term(self) -> Tensor:
        """μv = v′ + (1−ν)g, the momentum's part of the update of the velocity."""
        return self.velocity_after + self.gradient_term


Observable = Callable[[Snapshot], Tensor]
"""A function of a snapshot, one number for each replica."""
Direction = int | Tensor
"""A component of the parameters, given by its index, or any vector of the same length."""


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product over the last axis, in double precision.

    Args:
        a: Tensor of shape (…, d).
        b: Tensor of shape (…, d).

    Example:
        >>> inner(torch.ones(3, 4), torch.ones(3, 4)).tolist()
        [4.0, 4.0, 4.0]
    """
    return torch.linalg.vecdot(a, b).double()


def along(vector: Tensor, direction: Direction) -> Tensor:
    """Return the component of a vector along a direction, in double precision.

    Args:
        vector: Tensor of shape (…, d).
        direction: An index, or a tensor of shape (d,).

    Example:
        >>> float(along(torch.tensor([1.0, 2.0]), 1))
        2.0
        >>> float(along(torch.arange(2.0), torch.ones(2)))
        1.0
    """
    if isinstance(direction, int):
        return vector[..., direction].double()
    return inner(vector, direction.to(vector))


def fdr1_coefficient(lr: Scalar, momentum: Scalar = 0.0, dampening: Scalar = 0.0) -> Scalar:
    """Return (1+μ)/(2(1−ν)) η, the coefficient of ⟨v²⟩ in FDR1′.

    Args:
        lr: Learning rate η.
        momentum: Momentum μ.
        dampening: Dampening ν.

    Example:
        >>> fdr1_coefficient(0.1)
        0.05
    """
    return lr * (1 + momentum) / (2 * (1 - dampening))


def fdr1_left(s: Snapshot) -> Tensor:
    """Return O_L = θ·∇f^B, the left side of FDR1 and FDR1′.

    Args:
        s: The step.
    """
    return inner(s.parameters, s.gradient)


def fdr1_right(s: Snapshot) -> Tensor:
    """Return O_R = (1+μ)/(2(1−ν)) η v′², the right side of FDR1′ (of FDR1 at μ = ν = 0).

    The velocity is the one *after* the step. Only with this velocity does the residual telescope
    (the potential of `relations.fdr1`).

    Args:
        s: The step.
    """
    v = s.velocity_after
    return fdr1_coefficient(s.lr, s.momentum, s.dampening) * inner(v, v)


def step_left(s: Snapshot) -> Tensor:
    """Return −θ·Δ/η with Δ = ηv′, the left side of the step form −⟨θ·Δ⟩/η = ⟨Δ²⟩/(2η).

    The step form holds for any optimizer if `velocity` is Δ/η. For SGD without momentum it is FDR1.

    Args:
        s: The step.
    """
    return -inner(s.parameters, s.velocity_after)


def step_right(s: Snapshot) -> Tensor:
    """Return Δ²/(2η), the right side of the step form.

    Args:
        s: The step.
    """
    v = s.velocity_after
    return s.lr * inner(v, v) / 2


def fdr2_left(s: Snapshot, full_gradient: Tensor) -> Tensor:
    """Return O_FB = (1−ν)(∇f)² − μ v·∇f, the left side of FDR2.

    The paper uses the mini-batch gradient in the second term. The full gradient has the same mean
    there and a smaller variance.

    Args:
        s: The step.
        full_gradient: ∇f at θ.
    """
    push = _over_parameters(1 - s.dampening) * full_gradient - s.momentum_term
    return inner(push, full_gradient)


def fdr2_right(s: Snapshot, hessian_velocity: Tensor) -> Tensor:
    """Return (η/2) v′ᵀHv′, the right side of FDR2 to second order.

    Without momentum its mean is (η/2)Tr(HC̃). The factor ½ is missing in the paper's appendix.

    Args:
        s: The step.
        hessian_velocity: Hv′ at θ.
    """
    return s.lr * inner(s.velocity_after, hessian_velocity) / 2


def successive(previous: Tensor, s: Snapshot) -> Tensor:
    """Return −g_{t−1}·g_t; its mean is ⟨(∇f)²⟩ on a quadratic with independent batches at μ = 0.

    The mean of g_t is ∇f(θ − ηg_{t−1}) = ∇f − ηHg_{t−1}. The mean of g_{t−1}·g_t is therefore
    ⟨(∇f)²⟩ − η⟨Tr(HC̃)⟩, which is −⟨(∇f)²⟩ by FDR2.

    Args:
        previous: The mini-batch gradient g_{t−1} of the step before.
        s: The step t.
    """
    return -inner(previous, s.gradient)


def _over_parameters(setting: Scalar) -> Scalar:
    """Return a setting with a last axis that broadcasts over the parameters."""
    return setting[..., None] if isinstance(setting, Tensor) and setting.ndim else setting
