"""A relation is two sides and an average; a reading is what it says at one moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equilibrate import estimates, observables
from equilibrate.averages import HalfRunningMean
from equilibrate.estimates import Estimate
from equilibrate.observables import Direction, Observable, Scalar, Snapshot


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
    """The learning rate at the last measured step; nan if parameter groups have different ones."""

    @property
    def residual(self) -> float:
        """left/right − 1; nan where that is undefined."""
        return self.left / self.right - 1 if self.undefined is None else math.nan

    @property
    def difference(self) -> float:
        """What left exceeds right by: all there is to read where right is zero, as in ⟨∇f⟩ = 0."""
        return self.left - self.right

    @property
    def excess_loss(self) -> float:
        """⟨f − f₀⟩ ≈ right/2: how far the loss would fall if the learning rate went to zero.

        On a quadratic ⟨θ·∇f⟩ = 2⟨f − f₀⟩, so with FDR1 the height above the minimum is
        (η/4)⟨Tr C̃⟩, and with FDR1′ (1+μ)/(4(1−ν)) η⟨v²⟩. That asks for FDR1's own two sides (not
        the step form of another optimizer) of the whole model, for equilibrium, and for a loss
        that is quadratic over the distance that the parameters fluctuate; f includes the L2 term.
        """
        return self.right / 2

    @property
    def undefined(self) -> str | None:
        """Why the residual is undefined, or None where it is a number."""
        if self.count == 0:
            return "no step has been seen yet"
        if not (math.isfinite(self.left) and math.isfinite(self.right)):
            return f"non-finite averages (left {self.left:g}, right {self.right:g})"
        if self.right == 0 and self.left == 0:
            return "both sides are zero: nothing fluctuates"
        if self.right == 0:
            return f"the right side is zero (left {self.left:g}): read the difference instead"
        return None

    def __repr__(self) -> str:
        return (
            f"Reading(step={self.step}, count={self.count}, left={self.left:.6g}, "
            f"right={self.right:.6g}, lr={self.lr:.6g}, residual={self.residual:.4g})"
        )


class Relation:
    """⟨left⟩ = ⟨right⟩ at stationarity, followed by an average of both sides.

    Where the relation says that the mean of some Φ(θ, v) is constant, `potential` is this Φ, scaled
    so that left − right is what it loses in a step. Where left = right holds at every step,
    `self_check` is true: it tests the measurement and says nothing of equilibrium.

    >>> relation = fdr1()
    >>> theta = torch.tensor([2.0])
    >>> for g in [1.0, -0.9, 1.0, -0.9]:
    ...     relation.update(Snapshot(theta, torch.tensor([g]), lr=0.1))
    >>> relation.reading()
    Reading(step=4, count=2, left=0.1, right=0.04525, lr=0.1, residual=1.21)
    """

    def __init__(
        self,
        left: Observable,
        right: Observable,
        average: HalfRunningMean | None = None,
        *,
        potential: Observable | None = None,
        self_check: bool = False,
    ) -> None:
        self.left = left
        self.right = right
        self.average = average if average is not None else HalfRunningMean((2,))
        self.potential = potential
        self.self_check = self_check
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

    def measure(self, snapshots: Iterable[Snapshot]) -> Measurement:
        """Both sides and their difference over all the snapshots, with error bars.

        The snapshots are successive steps of a stationary run, or of several replicas on a leading
        axis. With a `potential` Φ the difference of one run is (Φ_0 − Φ_n)/n. Its error comes from
        the spread of Φ (`estimates.telescoping_mean`) and the left side's from those of the right
        side and of the difference, since batch means see a telescoping sum as far too noisy.
        Everything else is taken from batch means, or from the spread among replicas.
        """
        rows: list[Tensor] = []
        levels: list[Tensor] = []
        for s in snapshots:
            rows.append(torch.stack([self.left(s), self.right(s)]))
            if self.potential is not None:
                levels.append(self.potential(s))
        if not rows:
            raise ValueError("snapshots is empty: a relation is measured over at least one step")
        left, right = torch.stack(rows, 1)
        return measurement(left, right, torch.stack(levels) if levels else None)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Both sides of a relation with error bars, and their difference with its own."""

    left: Estimate
    right: Estimate
    difference: Estimate

    @property
    def residual(self) -> float:
        """left/right − 1; nan where the right side is zero."""
        return self.left.value / self.right.value - 1 if self.right.value else math.nan

    @property
    def holds(self) -> bool:
        """Whether the difference is zero within its 95 % confidence interval."""
        return self.difference.covers(0.0)


def measurement(left: Tensor, right: Tensor, potential: Tensor | None = None) -> Measurement:
    """What `Relation.measure` makes of the recorded series, (steps,) or (steps, replicas).

    >>> phi = torch.randn(1001, generator=torch.Generator().manual_seed(0)).double()
    >>> measurement(1 + phi[:-1] - phi[1:], torch.ones(1000), phi[:-1]).left.stderr < 0.002
    True
    """
    mean = estimates.mean(right)
    if potential is None or right[0].numel() > 1 or len(right) < 2:
        return Measurement(estimates.mean(left), mean, estimates.mean(left - right))
    drift = estimates.telescoping_mean((left - right).sum().item(), potential.reshape(-1))
    stderr = math.hypot(mean.stderr, drift.stderr)
    sum_of_both = Estimate(
        mean.value + drift.value,
        stderr,
        # Welch–Satterthwaite, with infinitely many degrees of freedom for the drift.
        dof=mean.dof * (stderr / mean.stderr) ** 4 if mean.stderr > 0 else math.inf,
        count=mean.count,
        method=f"{mean.method} of the right side, and the {drift.method}",
    )
    return Measurement(sum_of_both, mean, drift)


def master(observable: Callable[[Tensor], Tensor]) -> Relation:
    """(FDT), the master equation: ⟨O(θ)⟩ = ⟨O(θ − η∇f^B)⟩ for any O of the flat parameters.

    With momentum the step is ηv′, as in the master equation of appendix A. All that follows is this
    for some O; with O = f it is FDR2 to all orders (the paper's equation before FDR2).

    >>> relation = master(lambda theta: theta.square().sum(-1))
    >>> relation.update(Snapshot(torch.tensor([2.0]), torch.tensor([1.0]), lr=0.5))
    >>> relation.reading().left, relation.reading().right
    (4.0, 2.25)
    """

    def before(s: Snapshot) -> Tensor:
        return observable(s.parameters).double()

    def after(s: Snapshot) -> Tensor:
        return observable(s.parameters_after).double()

    return Relation(before, after, potential=before)


def mean_gradient(direction: Direction) -> Relation:
    """(FDT0): ⟨∇f⟩ = 0, along a component or a direction. Its right side is zero."""

    def potential(s: Snapshot) -> Tensor:
        position = observables.along(s.parameters, direction)
        carried = observables.along(s.carried, direction)
        return ((1 - s.momentum) * position / s.lr + carried) / (1 - s.dampening)

    left = partial(observables.gradient_along, direction=direction)
    return Relation(left, _zero, potential=potential)


def mean_velocity(direction: Direction) -> Relation:
    """Appendix A: ⟨v⟩ = 0, along a component or a direction. Its right side is zero."""
    left = partial(observables.velocity_along, direction=direction)
    return Relation(
        left, _zero, potential=lambda s: -observables.along(s.parameters, direction) / s.lr
    )


def matrix(first: Direction, second: Direction) -> Relation:
    """⟨θ_i ∂_j f⟩ + ⟨θ_j ∂_i f⟩ = η⟨C̃_ij⟩ (FDT1bare) for two components or directions.

    With momentum it is appendix A's "nonredundant" relation, (1−ν)[⟨θ_i ∂_j f⟩ + ⟨∂_i f θ_j⟩] −
    μ[⟨θ_i v_j⟩ + ⟨v_i θ_j⟩] = η⟨v_i v_j⟩: the mean of θ_i θ_j is constant. Its trace is FDR1′.
    """

    def potential(s: Snapshot) -> Tensor:
        a, b = (observables.along(s.parameters, d) for d in (first, second))
        return a * b / s.lr

    sides = observables.matrix_left, observables.matrix_right
    left, right = (partial(side, first=first, second=second) for side in sides)
    return Relation(left, right, potential=potential)


def fdr1() -> Relation:
    """(FDR1′): ⟨θ·∇f⟩ = (1+μ)/(2(1−ν)) η⟨v²⟩; (FDR1) at μ = ν = 0."""

    def potential(s: Snapshot) -> Tensor:
        overlap = observables.inner(s.parameters, s.carried)
        norm = (1 - s.momentum) * observables.norm_square(s) / (2 * s.lr)
        return (norm + overlap) / (1 - s.dampening)

    return Relation(observables.fdr1_left, observables.fdr1_right, potential=potential)


def any_step() -> Relation:
    """The step form −⟨θ·Δ⟩/η = ⟨Δ²⟩/(2η), for any optimizer with θ′ = θ + Δ."""
    return Relation(
        observables.step_left,
        observables.step_right,
        potential=lambda s: observables.norm_square(s) / (2 * s.lr),
    )


def velocity_update(direction: Direction) -> Relation:
    """Appendix A (redundant0): ⟨v⟩ = μ⟨v⟩ − (1−ν)⟨∇f⟩, v′ on the left. Self-check: every step."""
    left = partial(observables.velocity_along, direction=direction)
    right = partial(observables.velocity_update_right, direction=direction)
    return Relation(left, right, self_check=True)


def velocity_square(first: Direction, second: Direction) -> Relation:
    """Appendix A (redundant1), for ⟨v_i v_j⟩ with v′ on the left. Self-check: every step.

    ⟨v_i v_j⟩ = μ²⟨v_i v_j⟩ + (1−ν)²⟨C̃_ij⟩ − (1−ν)μ[⟨v_i ∂_j f⟩ + ⟨∂_i f v_j⟩].
    """
    sides = observables.velocity_square_left, observables.velocity_square_right
    left, right = (partial(side, first=first, second=second) for side in sides)
    return Relation(left, right, self_check=True)


def velocity_position(first: Direction, second: Direction) -> Relation:
    """Appendix A (redundant2), for ⟨v_i θ_j⟩ with v′ and θ′ on the left. Self-check: every step.

    ⟨v_i θ_j⟩ − η⟨v_i v_j⟩ = μ⟨v_i θ_j⟩ − (1−ν)⟨∂_i f θ_j⟩.
    """
    sides = observables.velocity_position_left, observables.velocity_position_right
    left, right = (partial(side, first=first, second=second) for side in sides)
    return Relation(left, right, self_check=True)


def cubic(first: Direction, second: Direction, third: Direction) -> Relation:
    """Section 2.3.2, the cubic relation contracted with three components or directions.

    ⟨θ_i θ_j ∂_k f + …⟩ = η⟨θ_i C̃_jk + …⟩ − η²⟨C̃_ijk⟩. It is the constancy of ⟨θ_i θ_j θ_k⟩, so
    that with −v′ for the gradient it holds with momentum too, and for any other optimizer.
    """
    directions = {"first": first, "second": second, "third": third}

    def potential(s: Snapshot) -> Tensor:
        a, b, c = (observables.along(s.parameters, d) for d in directions.values())
        return a * b * c / s.lr

    left = partial(observables.cubic_left, **directions)
    right = partial(observables.cubic_right, **directions)
    return Relation(left, right, potential=potential)


def fdr2(
    full_gradient: Callable[[Tensor], Tensor], hessian_product: Callable[[Tensor, Tensor], Tensor]
) -> Relation:
    """(FDR2) to second order: (1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩ = (η/2)⟨v′ᵀHv′⟩ + O(η²), exact on a quadratic.

    Without momentum ⟨(∇f)²⟩ = (η/2)⟨Tr(HC̃)⟩. The paper's appendix (FDR2p) lacks the ½.
    `full_gradient` maps θ to ∇f(θ) and `hessian_product` maps (θ, u) to H(θ)u.

    >>> relation = fdr2(lambda theta: 3 * theta, lambda theta, u: 3 * u)
    >>> relation.update(Snapshot(torch.tensor([1.0]), torch.tensor([2.0]), lr=0.1))
    >>> relation.reading()
    Reading(step=1, count=1, left=9, right=0.6, lr=0.1, residual=14)
    """

    def left(s: Snapshot) -> Tensor:
        return observables.fdr2_left(s, full_gradient(s.parameters))

    def right(s: Snapshot) -> Tensor:
        return observables.fdr2_right(s, hessian_product(s.parameters, s.velocity_after))

    return Relation(left, right)


def _zero(s: Snapshot) -> Tensor:
    return torch.zeros_like(s.parameters[..., 0], dtype=torch.float64)


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
