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
    (`velocity=None`) v′ = −(1−ν)g. `velocity_before` v is needed by the self-checks alone:
    elsewhere μv = v′ + (1−ν)g stands for it. Settings that differ among replicas are tensors over
    the leading axes.

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
    velocity_before: Tensor | None = None

    @property
    def velocity_after(self) -> Tensor:
        """v′, the velocity with which the step is made."""
        return -self.kick if self.velocity is None else self.velocity

    @property
    def parameters_after(self) -> Tensor:
        """θ′ = θ + ηv′."""
        return self.parameters + _over_parameters(self.lr) * self.velocity_after

    @property
    def kick(self) -> Tensor:
        """(1−ν)g, what the gradient takes from the velocity."""
        return _over_parameters(1 - self.dampening) * self.gradient

    @property
    def carried(self) -> Tensor:
        """μv, what is left of the velocity before the step: v′ + (1−ν)g."""
        return self.velocity_after + self.kick


Observable = Callable[[Snapshot], Tensor]
Direction = int | Tensor
"""A component of the parameters, by its index, or any vector of their length."""


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last axis, handed on in double precision for the sums over time.

    >>> inner(torch.ones(3, 4), torch.ones(3, 4)).tolist()
    [4.0, 4.0, 4.0]
    """
    return torch.linalg.vecdot(a, b).double()


def along(vector: Tensor, direction: Direction) -> Tensor:
    """The component of `vector` along a direction, in double precision.

    >>> float(along(torch.tensor([1.0, 2.0]), 1)), float(along(torch.arange(2.0), torch.ones(2)))
    (2.0, 1.0)
    """
    if isinstance(direction, int):
        return vector[..., direction].double()
    return inner(vector, direction.to(vector))


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


def gradient_along(s: Snapshot, direction: Direction) -> Tensor:
    """a·∇f^B, whose mean vanishes (the paper's ⟨∇f⟩ = 0)."""
    return along(s.gradient, direction)


def velocity_along(s: Snapshot, direction: Direction) -> Tensor:
    """a·v′, whose mean vanishes (appendix A, ⟨v⟩ = 0)."""
    return along(s.velocity_after, direction)


def matrix_left(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """(1−ν)[θ_a g_b + g_a θ_b] − μ[θ_a v_b + v_a θ_b], left of the matrix relation.

    v is the velocity before the step, so that this is θ_a u_b + u_a θ_b with u = −v′, which is g
    for plain SGD.
    """
    (a, ua), (b, ub) = _positions_and_pulls(s, first, second)
    return a * ub + ua * b


def matrix_right(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """η v′_a v′_b, right of the matrix relation; η C̃_ab in the mean without momentum."""
    v = s.velocity_after
    return s.lr * along(v, first) * along(v, second)


def velocity_square_left(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """v′_a v′_b."""
    return along(s.velocity_after, first) * along(s.velocity_after, second)


def velocity_square_right(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """μ²v_a v_b + (1−ν)²g_a g_b − μ(1−ν)[v_a g_b + g_a v_b]."""
    v, g = momentum_term(s), s.kick
    va, vb, ga, gb = along(v, first), along(v, second), along(g, first), along(g, second)
    return va * vb + ga * gb - va * gb - ga * vb


def velocity_position_left(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """v′_a θ′_b − η v′_a v′_b."""
    v = along(s.velocity_after, first)
    return v * along(s.parameters_after, second) - s.lr * v * along(s.velocity_after, second)


def velocity_position_right(s: Snapshot, first: Direction, second: Direction) -> Tensor:
    """μ v_a θ_b − (1−ν) g_a θ_b."""
    return along(momentum_term(s) - s.kick, first) * along(s.parameters, second)


def velocity_update_right(s: Snapshot, direction: Direction) -> Tensor:
    """a·[μv − (1−ν)g]."""
    return along(momentum_term(s) - s.kick, direction)


def momentum_term(s: Snapshot) -> Tensor:
    """μv from the velocity before the step, which a self-check must not take from the one after."""
    if s.velocity_before is None:
        raise ValueError(
            "velocity_before is None: a self-check compares the velocities before and after the "
            "step, so give the snapshot both"
        )
    return _over_parameters(s.momentum) * s.velocity_before


def cubic_left(s: Snapshot, first: Direction, second: Direction, third: Direction) -> Tensor:
    """θ_a θ_b u_c + θ_a u_b θ_c + u_a θ_b θ_c with u = −v′, which is g for plain SGD."""
    (a, ua), (b, ub), (c, uc) = _positions_and_pulls(s, first, second, third)
    return a * b * uc + a * ub * c + ua * b * c


def cubic_right(s: Snapshot, first: Direction, second: Direction, third: Direction) -> Tensor:
    """η[θ_a u_b u_c + θ_b u_c u_a + θ_c u_a u_b] − η² u_a u_b u_c with u = −v′."""
    (a, ua), (b, ub), (c, uc) = _positions_and_pulls(s, first, second, third)
    return s.lr * (a * ub * uc + b * uc * ua + c * ua * ub) - s.lr**2 * ua * ub * uc


def fdr2_left(s: Snapshot, full_gradient: Tensor, again: Tensor | None = None) -> Tensor:
    """O_FB = (1−ν)(∇f)² − μ v·∇f, left of FDR2, with ∇f = `full_gradient` at θ.

    The paper takes the mini-batch gradient in the second term; ∇f has the same mean there and
    fluctuates less. Gradients of two independent batches, neither of them the step's own, serve as
    well: with the second given as `again` the mean is the same.
    """
    push = _over_parameters(1 - s.dampening) * full_gradient - s.carried
    return inner(push, full_gradient if again is None else again)


def fdr2_right(s: Snapshot, hessian_velocity: Tensor) -> Tensor:
    """(η/2) v′ᵀHv′, right of FDR2 to second order, with `hessian_velocity` Hv′ at θ.

    The appendix of the paper lacks the ½. Without momentum the mean is (η/2)Tr(HC̃).
    """
    return s.lr * inner(s.velocity_after, hessian_velocity) / 2


def successive(previous: Tensor, s: Snapshot) -> Tensor:
    """−g_{t−1}·g_t, with the mean ⟨(∇f)²⟩ on a quadratic without momentum and with fresh batches.

    g_t has the mean ∇f(θ − ηg_{t−1}) = ∇f − ηHg_{t−1}, so the product is (∇f)² − ηTr(HC̃) in the
    mean, and FDR2 makes that −(∇f)².
    """
    return -inner(previous, s.gradient)


def _positions_and_pulls(s: Snapshot, *directions: Direction) -> list[tuple[Tensor, Tensor]]:
    """θ_a and u_a = −v′_a for each direction a."""
    v = s.velocity_after
    return [(along(s.parameters, d), -along(v, d)) for d in directions]


def _over_parameters(setting: Scalar) -> Scalar:
    """A setting of each replica, ready to multiply vectors whose last axis is the parameters."""
    return setting[..., None] if isinstance(setting, Tensor) and setting.ndim else setting
