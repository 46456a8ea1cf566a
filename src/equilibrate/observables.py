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
    (see `relations.telescoped_residual`).

    Args:
        s: The step.
    """
    v = s.velocity_after
    return fdr1_coefficient(s.lr, s.momentum, s.dampening) * inner(v, v)


def norm_square(s: Snapshot) -> Tensor:
    """Return N = |θ|² before the step. FDR1 holds when the mean of N has stopped drifting.

    Args:
        s: The step.
    """
    return inner(s.parameters, s.parameters)


def overlap(s: Snapshot) -> Tensor:
    """Return θ·v′, with θ before and v′ after the step.

    Together with `norm_square` it gives the telescoped form of FDR1′.

    Args:
        s: The step.
    """
    return inner(s.parameters, s.velocity_after)


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


def gradient_along(s: Snapshot, direction: Direction) -> Tensor:
    """Return a·∇f^B. Its stationary mean is zero (the paper's ⟨∇f⟩ = 0).

    Args:
        s: The step.
        direction: The direction a.
    """
    return along(s.gradient, direction)


def velocity_along(s: Snapshot, direction: Direction) -> Tensor:
    """Return a·v′. Its stationary mean is zero (appendix A, ⟨v⟩ = 0).

    Args:
        s: The step.
        direction: The direction a.
    """
    return along(s.velocity_after, direction)


def matrix_left(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """Return (1−ν)[θ_a g_b + g_a θ_b] − μ[θ_a v_b + v_a θ_b], left side of the matrix relation.

    It is computed as θ_a u_b + u_a θ_b with u = −v′, which is g for SGD without momentum.

    Args:
        s: The step.
        first: The direction a.
        second: The direction b.
    """
    (a, ua), (b, ub) = _parameters_and_descent(s, first, second)
    return a * ub + ua * b


def matrix_right(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """Return η v′_a v′_b, right side of the matrix relation; its mean is η C̃_ab at μ = ν = 0.

    Args:
        s: The step.
        first: The direction a.
        second: The direction b.
    """
    v = s.velocity_after
    return s.lr * along(v, first) * along(v, second)


def velocity_square_left(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """Return v′_a v′_b.

    Args:
        s: The step.
        first: The direction a.
        second: The direction b.
    """
    return along(s.velocity_after, first) * along(s.velocity_after, second)


def velocity_square_right(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """Return μ²v_a v_b + (1−ν)²g_a g_b − μ(1−ν)[v_a g_b + g_a v_b].

    Args:
        s: The step, with `velocity_before`.
        first: The direction a.
        second: The direction b.
    """
    v, g = recorded_momentum_term(s), s.gradient_term
    va, vb, ga, gb = along(v, first), along(v, second), along(g, first), along(g, second)
    return va * vb + ga * gb - va * gb - ga * vb


def velocity_position_left(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """Return v′_a θ′_b − η v′_a v′_b.

    Args:
        s: The step.
        first: The direction a.
        second: The direction b.
    """
    v = along(s.velocity_after, first)
    return v * along(s.parameters_after, second) - s.lr * v * along(s.velocity_after, second)


def velocity_position_right(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """Return μ v_a θ_b − (1−ν) g_a θ_b.

    Args:
        s: The step, with `velocity_before`.
        first: The direction a.
        second: The direction b.
    """
    return along(recorded_momentum_term(s) - s.gradient_term, first) * along(s.parameters, second)


def velocity_update_right(s: Snapshot, direction: Direction) -> Tensor:
    """Return a·[μv − (1−ν)g].

    Args:
        s: The step, with `velocity_before`.
        direction: The direction a.
    """
    return along(recorded_momentum_term(s) - s.gradient_term, direction)


def recorded_momentum_term(s: Snapshot) -> Tensor:
    """Return μv from the velocity recorded before the step.

    The self-checks use it. With `Snapshot.momentum_term`, which is computed from the velocity after
    the step, they would hold trivially.

    Args:
        s: The step, with `velocity_before`.

    Raises:
        ValueError: If the snapshot has no `velocity_before`.
    """
    if s.velocity_before is None:
        raise ValueError(
            "velocity_before is None, but a self-check compares the velocities before and after "
            "the step: set velocity_before in the snapshot"
        )
    return _over_parameters(s.momentum) * s.velocity_before


def cubic_left(s: Snapshot, first: Direction, second: Direction, third: Direction) -> Tensor:
    """Return θ_a θ_b u_c + θ_a u_b θ_c + u_a θ_b θ_c with u = −v′ (g for SGD without momentum).

    Args:
        s: The step.
        first: The direction a.
        second: The direction b.
        third: The direction c.
    """
    (a, ua), (b, ub), (c, uc) = _parameters_and_descent(s, first, second, third)
    return a * b * uc + a * ub * c + ua * b * c


def cubic_right(s: Snapshot, first: Direction, second: Direction, third: Direction) -> Tensor:
    """Return η[θ_a u_b u_c + θ_b u_c u_a + θ_c u_a u_b] − η² u_a u_b u_c with u = −v′.

    Args:
        s: The step.
        first: The direction a.
        second: The direction b.
        third: The direction c.
    """
    (a, ua), (b, ub), (c, uc) = _parameters_and_descent(s, first, second, third)
    return s.lr * (a * ub * uc + b * uc * ua + c * ua * ub) - s.lr**2 * ua * ub * uc


def fdr2_left(s: Snapshot, full_gradient: Tensor, other_gradient: Tensor | None = None) -> Tensor:
    """Return O_FB = (1−ν)(∇f)² − μ v·∇f, the left side of FDR2.

    The paper uses the mini-batch gradient in the second term. The full gradient has the same mean
    there and a smaller variance. Instead of one full gradient, the gradients of two independent
    batches can be given, neither of them the batch of the step: the mean is the same.

    Args:
        s: The step.
        full_gradient: ∇f at θ, or the gradient of a first independent batch.
        other_gradient: The gradient of a second independent batch. Default: `full_gradient`.
    """
    push = _over_parameters(1 - s.dampening) * full_gradient - s.momentum_term
    return inner(push, full_gradient if other_gradient is None else other_gradient)


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


def _parameters_and_descent(s: Snapshot, *directions: Direction) -> list[tuple[Tensor, Tensor]]:
    """Return θ_a and u_a = −v′_a for each direction a."""
    v = s.velocity_after
    return [(along(s.parameters, d), -along(v, d)) for d in directions]


def _over_parameters(setting: Scalar) -> Scalar:
    """Return a setting with a last axis that broadcasts over the parameters."""
    return setting[..., None] if isinstance(setting, Tensor) and setting.ndim else setting
