"""The stationary relations: pairs of observables with equal means, measured with error bars.

Each equation of the paper is a function that returns a `Relation`, whose `measure` averages both
sides over a recorded run. Directions i, j, k are components of θ or any vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.observables import (
    Direction,
    Observable,
    Snapshot,
    along,
    fdr1_left,
    fdr1_right,
    fdr2_left,
    fdr2_right,
    inner,
    step_left,
    step_right,
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Both sides of a relation and their difference over a run, each with an error bar."""

    left: Estimate
    """Mean of the left side."""
    right: Estimate
    """Mean of the right side."""
    difference: Estimate
    """Mean of left − right. Its error is not that of two independent means."""

    @property
    def residual(self) -> float:
        """left/right − 1; nan if the right side is zero."""
        return self.left.value / self.right.value - 1 if self.right.value else math.nan

    @property
    def holds(self) -> bool:
        """Whether the difference is zero within its 95 % confidence interval."""
        return self.difference.covers(0.0)


@dataclass(frozen=True, slots=True)
class Relation:
    """⟨left⟩ = ⟨right⟩ in the stationary state."""

    left: Observable
    """Observable on the left side."""
    right: Observable
    """Observable on the right side."""
    potential: Observable | None = None
    """If the relation states that the mean of some Φ(θ, v) is constant, this Φ, scaled such that
    left − right is the decrease of Φ in one step."""
    self_check: bool = False
    """Whether left = right at every step, so that it tests the measurement, not stationarity."""

    def measure(self, snapshots: Iterable[Snapshot]) -> Measurement:
        """Average both sides and their difference over a stationary run, with error bars.

        Args:
            snapshots: Successive steps of one run, or of several replicas on a leading axis.

        Returns:
            Left side, right side and their difference, see `measure_series`.

        Raises:
            ValueError: If there are no snapshots.

        Example:
            FDR1 on an exactly solvable model:

            >>> from equilibrate.solvable import Quadratic
            >>> sgd = Quadratic(torch.tensor([1.0, 0.5]), noise=torch.ones(2), lr=0.3)
            >>> generator = torch.Generator().manual_seed(0)
            >>> start = sgd.stationary(replicas=1, generator=generator)
            >>> found = fdr1().measure(sgd.simulate(start, steps=2000, generator=generator))
            >>> found.holds, found.right.covers(sgd.fdr1_right)
            (True, True)
        """
        observed = [f for f in (self.left, self.right, self.potential) if f is not None]
        rows = [torch.stack([f(s) for f in observed]) for s in snapshots]
        if not rows:
            raise ValueError(
                "snapshots has no steps: pass at least one, and a list, not an iterator, to "
                "measure more than one relation"
            )
        return measure_series(*torch.stack(rows, 1))


def measure_series(left: Tensor, right: Tensor, potential: Tensor | None = None) -> Measurement:
    """Average recorded series of both sides.

    With a potential Φ the difference of a single run is (Φ_0 − Φ_n)/n. Batch means would
    overestimate the error of such a telescoping sum, so its error is computed from the variance of
    Φ (`estimates.telescoping_mean`), and the error of the left side from those of the right side
    and of the difference. All other errors are computed from batch means, or from the spread among
    replicas.

    Args:
        left: Left side, of shape (steps,) or (steps, replicas).
        right: Right side, of the same shape.
        potential: Potential Φ before each step, of the same shape, for a relation that has one.

    Returns:
        Left side, right side and their difference.

    Example:
        >>> phi = torch.randn(1001, generator=torch.Generator().manual_seed(0)).double()
        >>> measure_series(1 + phi[:-1] - phi[1:], torch.ones(1000), phi[:-1]).left.stderr < 0.002
        True
    """
    mean = estimates.mean(right)
    if potential is None or right[0].numel() > 1 or len(right) < 2:
        return Measurement(estimates.mean(left), mean, estimates.mean(left - right))
    drift = estimates.telescoping_mean((left - right).sum().item(), potential.reshape(-1))
    stderr = math.hypot(mean.stderr, drift.stderr)
    left_mean = Estimate(
        mean.value + drift.value,
        stderr,
        # Welch–Satterthwaite, with infinitely many degrees of freedom for the drift.
        dof=mean.dof * (stderr / mean.stderr) ** 4 if mean.stderr > 0 else math.inf,
        count=mean.count,
        method=f"{mean.method} of the right side, and the {drift.method}",
    )
    return Measurement(left_mean, mean, drift)


def master(observable: Callable[[Tensor], Tensor]) -> Relation:
    """Return (FDT), the master equation: ⟨O(θ)⟩ = ⟨O(θ − η∇f^B)⟩ for any O(θ).

    With momentum the step is ηv′, as in appendix A. The other relations are special cases for some
    O. With O = f it is FDR2 to all orders (the paper's equation before FDR2).

    Args:
        observable: O, a function of the flat parameters of shape (…, d).

    Example:
        >>> relation = master(lambda theta: theta.square().sum(-1))
        >>> step = Snapshot(torch.tensor([2.0]), torch.tensor([1.0]), lr=0.5)
        >>> relation.left(step).item(), relation.right(step).item()
        (4.0, 2.25)
    """

    def before(s: Snapshot) -> Tensor:
        return observable(s.parameters).double()

    def after(s: Snapshot) -> Tensor:
        return observable(s.parameters_after).double()

    return Relation(before, after, potential=before)


def mean_gradient(direction: Direction) -> Relation:
    """Return (FDT0): ⟨a·∇f⟩ = 0. The right side is zero.

    Args:
        direction: The direction a.
    """

    def potential(s: Snapshot) -> Tensor:
        position, momentum = along(s.parameters, direction), along(s.momentum_term, direction)
        return ((1 - s.momentum) * position / s.lr + momentum) / (1 - s.dampening)

    return Relation(lambda s: along(s.gradient, direction), _zero, potential)


def mean_velocity(direction: Direction) -> Relation:
    """Return ⟨a·v⟩ = 0 (appendix A). The right side is zero.

    Args:
        direction: The direction a.
    """
    return Relation(
        lambda s: along(s.velocity_after, direction),
        _zero,
        potential=lambda s: -along(s.parameters, direction) / s.lr,
    )


def matrix(first: Direction, second: Direction) -> Relation:
    """Return ⟨θ_i ∂_j f⟩ + ⟨θ_j ∂_i f⟩ = η⟨C̃_ij⟩ (FDT1bare): the mean of θ_i θ_j is constant.

    With momentum it is the "nonredundant" relation of appendix A,
    (1−ν)[⟨θ_i ∂_j f⟩ + ⟨∂_i f θ_j⟩] − μ[⟨θ_i v_j⟩ + ⟨v_i θ_j⟩] = η⟨v_i v_j⟩. Its trace is FDR1′.

    Args:
        first: The direction i.
        second: The direction j.
    """

    def left(s: Snapshot) -> Tensor:
        (a, ua), (b, ub) = _positions_and_descents(s, first, second)
        return a * ub + ua * b

    def right(s: Snapshot) -> Tensor:
        return s.lr * along(s.velocity_after, first) * along(s.velocity_after, second)

    def potential(s: Snapshot) -> Tensor:
        return along(s.parameters, first) * along(s.parameters, second) / s.lr

    return Relation(left, right, potential)


def fdr1() -> Relation:
    """Return (FDR1′): ⟨θ·∇f⟩ = (1+μ)/(2(1−ν)) η⟨v²⟩; (FDR1) at μ = ν = 0.

    It telescopes: Σ(left − right) over the steps s, …, T−1 is Φ_s − Φ_T with the potential
    Φ = [(1−μ)|θ|²/(2η) + μθ·v]/(1−ν), for any loss, sampling and noise, as long as η, μ and ν are
    constant. So FDR1 tests whether the norm has stopped drifting.
    """

    def potential(s: Snapshot) -> Tensor:
        norm = (1 - s.momentum) * inner(s.parameters, s.parameters) / (2 * s.lr)
        return (norm + inner(s.parameters, s.momentum_term)) / (1 - s.dampening)

    return Relation(fdr1_left, fdr1_right, potential)


def step_form() -> Relation:
    """Return the step form −⟨θ·Δ⟩/η = ⟨Δ²⟩/(2η), valid for any optimizer with θ′ = θ + Δ."""
    return Relation(
        step_left, step_right, potential=lambda s: inner(s.parameters, s.parameters) / (2 * s.lr)
    )


def velocity_update(direction: Direction) -> Relation:
    """Return appendix A (redundant0), ⟨v⟩ = μ⟨v⟩ − (1−ν)⟨∇f⟩ with v′ on the left. Self-check.

    Args:
        direction: The direction a.
    """
    return Relation(
        lambda s: along(s.velocity_after, direction),
        lambda s: _recorded_velocity_term(s, direction) - along(s.gradient_term, direction),
        self_check=True,
    )


def velocity_square(first: Direction, second: Direction) -> Relation:
    """Return appendix A (redundant1) for ⟨v_i v_j⟩ with v′ on the left. Self-check.

    ⟨v_i v_j⟩ = μ²⟨v_i v_j⟩ + (1−ν)²⟨C̃_ij⟩ − (1−ν)μ[⟨v_i ∂_j f⟩ + ⟨∂_i f v_j⟩].

    Args:
        first: The direction i.
        second: The direction j.
    """

    def left(s: Snapshot) -> Tensor:
        return along(s.velocity_after, first) * along(s.velocity_after, second)

    def right(s: Snapshot) -> Tensor:
        va, vb = (_recorded_velocity_term(s, d) for d in (first, second))
        ga, gb = (along(s.gradient_term, d) for d in (first, second))
        return va * vb + ga * gb - va * gb - ga * vb

    return Relation(left, right, self_check=True)


def velocity_position(first: Direction, second: Direction) -> Relation:
    """Return appendix A (redundant2) for ⟨v_i θ_j⟩ with v′ and θ′ on the left. Self-check.

    ⟨v_i θ_j⟩ − η⟨v_i v_j⟩ = μ⟨v_i θ_j⟩ − (1−ν)⟨∂_i f θ_j⟩.

    Args:
        first: The direction i.
        second: The direction j.
    """

    def left(s: Snapshot) -> Tensor:
        v = along(s.velocity_after, first)
        return v * along(s.parameters_after, second) - s.lr * v * along(s.velocity_after, second)

    def right(s: Snapshot) -> Tensor:
        v = _recorded_velocity_term(s, first) - along(s.gradient_term, first)
        return v * along(s.parameters, second)

    return Relation(left, right, self_check=True)


def cubic(first: Direction, second: Direction, third: Direction) -> Relation:
    """Return the cubic relation of section 2.3.2: the mean of θ_i θ_j θ_k is constant.

    ⟨θ_i θ_j ∂_k f + …⟩ = η⟨θ_i C̃_jk + …⟩ − η²⟨C̃_ijk⟩. The gradient is replaced by −v′, so that the
    relation also holds with momentum and for other optimizers.

    Args:
        first: The direction i.
        second: The direction j.
        third: The direction k.
    """
    directions = first, second, third

    def left(s: Snapshot) -> Tensor:
        (a, ua), (b, ub), (c, uc) = _positions_and_descents(s, *directions)
        return a * b * uc + a * ub * c + ua * b * c

    def right(s: Snapshot) -> Tensor:
        (a, ua), (b, ub), (c, uc) = _positions_and_descents(s, *directions)
        return s.lr * (a * ub * uc + b * uc * ua + c * ua * ub) - s.lr**2 * ua * ub * uc

    def potential(s: Snapshot) -> Tensor:
        a, b, c = (along(s.parameters, d) for d in directions)
        return a * b * c / s.lr

    return Relation(left, right, potential)


def fdr2(
    full_gradient: Callable[[Tensor], Tensor], hessian_product: Callable[[Tensor, Tensor], Tensor]
) -> Relation:
    """Return (FDR2) to second order: (1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩ = (η/2)⟨v′ᵀHv′⟩ + O(η²).

    It is exact on a quadratic. Without momentum it is ⟨(∇f)²⟩ = (η/2)⟨Tr(HC̃)⟩. The factor ½ is
    missing in the paper's appendix (FDR2p).

    Args:
        full_gradient: Maps θ to ∇f(θ).
        hessian_product: Maps (θ, u) to H(θ)u.

    Example:
        >>> relation = fdr2(lambda theta: 3 * theta, lambda theta, u: 3 * u)
        >>> step = Snapshot(torch.tensor([1.0]), torch.tensor([2.0]), lr=0.1)
        >>> relation.left(step).item(), round(relation.right(step).item(), 6)
        (9.0, 0.6)
    """
    return Relation(
        lambda s: fdr2_left(s, full_gradient(s.parameters)),
        lambda s: fdr2_right(s, hessian_product(s.parameters, s.velocity_after)),
    )


def sgld(step_size: float, centre: Tensor | None = None) -> Relation:
    """Return ⟨(θ−c)·g⟩ = d + (ε/4)⟨g²⟩ of stochastic gradient Langevin dynamics.

    The step is θ′ = θ − (ε/2)g + √ε ξ, where g is a gradient of the potential U, on a mini-batch or
    not, and ξ is standard normal in d dimensions. The relation is FDR1 of SGD with learning rate
    ε/2 and gradient g − (2/√ε)ξ, averaged over ξ: exact for any U, any ε and any noise of g.

    Where U is quadratic with its minimum at c, half the left side is the mean of U above its
    minimum: d/2, as exp(−U) has it, plus (ε/8)⟨g²⟩. Every estimate from the mean potential has this
    bias of the step size, among them the local learning coefficient.

    Args:
        step_size: ε, the variance of the noise that a step adds to each component. Snapshots hold
            θ before the step and g without ξ.
        centre: The point c, of shape (d,); the origin if not given. A point near the minimum gives
            the smallest error.

    Raises:
        ValueError: If `step_size` is not positive.

    Example:
        >>> step = Snapshot(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.5]), lr=0.05)
        >>> sgld(step_size=0.1).right(step).item()
        2.0625
    """
    if not step_size > 0:
        raise ValueError(f"step_size must be positive, such as 1e-4, got {step_size}")

    def left(s: Snapshot) -> Tensor:
        return inner(s.parameters if centre is None else s.parameters - centre, s.gradient)

    def right(s: Snapshot) -> Tensor:
        return s.parameters.shape[-1] + step_size / 4 * inner(s.gradient, s.gradient)

    return Relation(left, right)


def _zero(s: Snapshot) -> Tensor:
    return torch.zeros_like(s.parameters[..., 0], dtype=torch.float64)


def _positions_and_descents(s: Snapshot, *directions: Direction) -> list[tuple[Tensor, Tensor]]:
    """Return θ_i and −v′_i for each direction i; −v′ is g for SGD without momentum."""
    v = s.velocity_after
    return [(along(s.parameters, d), -along(v, d)) for d in directions]


def _recorded_velocity_term(s: Snapshot, direction: Direction) -> Tensor:
    """Return μv_i from the velocity before the step; from v′ self-checks would hold trivially.

    Raises:
        ValueError: If the snapshot has no `velocity_before`.
    """
    if s.velocity_before is None:
        raise ValueError(
            "velocity_before is None, but a self-check compares the velocities before and after "
            "the step: set velocity_before in the snapshot"
        )
    return s.momentum * along(s.velocity_before, direction)
