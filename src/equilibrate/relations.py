"""The stationary relations: two observables with equal means, and the average of both.

Each equation of the paper is a function that returns a `Relation`. A `Relation` follows a running
average and gives a `Reading`, or measures a recorded run and gives a `Measurement`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from equilibrate import observables
from equilibrate.averages import HalfRunningMean
from equilibrate.measurements import Measurement, measure_series
from equilibrate.observables import Direction, Observable, Scalar, Snapshot
from equilibrate.readings import Reading


class Relation:
    """⟨left⟩ = ⟨right⟩ in the stationary state, with a running average of both sides.

    Args:
        left: Observable on the left side.
        right: Observable on the right side.
        average: Average of shape (2,) over both sides. Default: the paper's half-running mean.
        potential: If the relation states that the mean of some Φ(θ, v) is constant, this Φ, scaled
            such that left − right is the decrease of Φ in one step.
        self_check: Whether left = right holds at every step. Such a relation tests the measurement
            and not stationarity.

    Example:
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
        """Add one step to the running average.

        Args:
            snapshot: The step.
        """
        self.average.update(torch.stack([self.left(snapshot), self.right(snapshot)]))
        self._lr = snapshot.lr
        self._step += 1

    def reading(self) -> Reading:
        """Return both sides, averaged over the current window."""
        left, right = self.average.value.tolist()
        return Reading(self._step, self.average.window, left, right, float(self._lr))

    def measure(self, snapshots: Iterable[Snapshot]) -> Measurement:
        """Average both sides and their difference over a stationary run, with error bars.

        With a `potential` Φ the difference of a single run is (Φ_0 − Φ_n)/n. Batch means would
        overestimate the error of such a telescoping sum, so its error is computed from the variance
        of Φ (`estimates.telescoping_mean`), and the error of the left side from those of the right
        side and of the difference. All other errors are computed from batch means, or from the
        spread among replicas.

        Args:
            snapshots: Successive steps of one run, or of several replicas on a leading axis.

        Returns:
            Left side, right side and their difference.

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
        rows: list[Tensor] = []
        levels: list[Tensor] = []
        for s in snapshots:
            rows.append(torch.stack([self.left(s), self.right(s)]))
            if self.potential is not None:
                levels.append(self.potential(s))
        if not rows:
            if isinstance(snapshots, Iterator):
                raise ValueError(
                    f"snapshots is a {type(snapshots).__name__} with no steps left: pass a list of "
                    "the steps to use them more than once"
                )
            raise ValueError("snapshots is empty: pass at least one step")
        left, right = torch.stack(rows, 1)
        return measure_series(left, right, torch.stack(levels) if levels else None)


def master(observable: Callable[[Tensor], Tensor]) -> Relation:
    """Return (FDT), the master equation: ⟨O(θ)⟩ = ⟨O(θ − η∇f^B)⟩ for any O(θ).

    With momentum the step is ηv′, as in appendix A. The other relations are special cases for some
    O. With O = f it is FDR2 to all orders (the paper's equation before FDR2).

    Args:
        observable: O, a function of the flat parameters of shape (…, d).

    Example:
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
    """Return (FDT0): ⟨a·∇f⟩ = 0. The right side is zero.

    Args:
        direction: The direction a.
    """

    def potential(s: Snapshot) -> Tensor:
        position = observables.along(s.parameters, direction)
        momentum = observables.along(s.momentum_term, direction)
        return ((1 - s.momentum) * position / s.lr + momentum) / (1 - s.dampening)

    left = partial(observables.gradient_along, direction=direction)
    return Relation(left, _zero, potential=potential)


def mean_velocity(direction: Direction) -> Relation:
    """Return ⟨a·v⟩ = 0 (appendix A). The right side is zero.

    Args:
        direction: The direction a.
    """
    left = partial(observables.velocity_along, direction=direction)
    return Relation(
        left, _zero, potential=lambda s: -observables.along(s.parameters, direction) / s.lr
    )


def matrix(first: Direction, second: Direction) -> Relation:
    """Return ⟨θ_i ∂_j f⟩ + ⟨θ_j ∂_i f⟩ = η⟨C̃_ij⟩ (FDT1bare): the mean of θ_i θ_j is constant.

    With momentum it is the "nonredundant" relation of appendix A,
    (1−ν)[⟨θ_i ∂_j f⟩ + ⟨∂_i f θ_j⟩] − μ[⟨θ_i v_j⟩ + ⟨v_i θ_j⟩] = η⟨v_i v_j⟩. Its trace is FDR1′.

    Args:
        first: The direction i.
        second: The direction j.
    """

    def potential(s: Snapshot) -> Tensor:
        a, b = (observables.along(s.parameters, d) for d in (first, second))
        return a * b / s.lr

    sides = observables.matrix_left, observables.matrix_right
    left, right = (partial(side, first=first, second=second) for side in sides)
    return Relation(left, right, potential=potential)


def fdr1() -> Relation:
    """Return (FDR1′): ⟨θ·∇f⟩ = (1+μ)/(2(1−ν)) η⟨v²⟩; (FDR1) at μ = ν = 0."""

    def potential(s: Snapshot) -> Tensor:
        overlap = observables.inner(s.parameters, s.momentum_term)
        norm = (1 - s.momentum) * observables.norm_square(s) / (2 * s.lr)
        return (norm + overlap) / (1 - s.dampening)

    return Relation(observables.fdr1_left, observables.fdr1_right, potential=potential)


def step_form() -> Relation:
    """Return the step form −⟨θ·Δ⟩/η = ⟨Δ²⟩/(2η), valid for any optimizer with θ′ = θ + Δ."""
    return Relation(
        observables.step_left,
        observables.step_right,
        potential=lambda s: observables.norm_square(s) / (2 * s.lr),
    )


def velocity_update(direction: Direction) -> Relation:
    """Return appendix A (redundant0), ⟨v⟩ = μ⟨v⟩ − (1−ν)⟨∇f⟩ with v′ on the left. Self-check.

    Args:
        direction: The direction a.
    """
    left = partial(observables.velocity_along, direction=direction)
    right = partial(observables.velocity_update_right, direction=direction)
    return Relation(left, right, self_check=True)


def velocity_square(first: Direction, second: Direction) -> Relation:
    """Return appendix A (redundant1) for ⟨v_i v_j⟩ with v′ on the left. Self-check.

    ⟨v_i v_j⟩ = μ²⟨v_i v_j⟩ + (1−ν)²⟨C̃_ij⟩ − (1−ν)μ[⟨v_i ∂_j f⟩ + ⟨∂_i f v_j⟩].

    Args:
        first: The direction i.
        second: The direction j.
    """
    sides = observables.velocity_square_left, observables.velocity_square_right
    left, right = (partial(side, first=first, second=second) for side in sides)
    return Relation(left, right, self_check=True)


def velocity_position(first: Direction, second: Direction) -> Relation:
    """Return appendix A (redundant2) for ⟨v_i θ_j⟩ with v′ and θ′ on the left. Self-check.

    ⟨v_i θ_j⟩ − η⟨v_i v_j⟩ = μ⟨v_i θ_j⟩ − (1−ν)⟨∂_i f θ_j⟩.

    Args:
        first: The direction i.
        second: The direction j.
    """
    sides = observables.velocity_position_left, observables.velocity_position_right
    left, right = (partial(side, first=first, second=second) for side in sides)
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
    """Return (FDR2) to second order: (1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩ = (η/2)⟨v′ᵀHv′⟩ + O(η²).

    It is exact on a quadratic. Without momentum it is ⟨(∇f)²⟩ = (η/2)⟨Tr(HC̃)⟩. The factor ½ is
    missing in the paper's appendix (FDR2p).

    Args:
        full_gradient: Maps θ to ∇f(θ).
        hessian_product: Maps (θ, u) to H(θ)u.

    Example:
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
    """Return the mean of O_L − O_R over a window, computed from the two ends of the window.

    Σ (O_L − O_R) = [ −(1−μ)(N_T − N_s)/(2η) + μ(θ_s·v_s − θ_T·v_T) ] / (1−ν)

    holds for any loss, sampling and noise as long as η, μ and ν are constant. FDR1 therefore tests
    whether the norm N = |θ|² has stopped drifting.

    Args:
        norm_square: (N_s, N_T) at the start and at the end of the window.
        overlap: (θ_s·v_s, θ_T·v_T) at the start and at the end of the window.
        steps: Number of steps in the window, T − s.
        lr: Learning rate η.
        momentum: Momentum μ.
        dampening: Dampening ν.

    Raises:
        ValueError: If `steps` is less than 1.

    Example:
        One step from θ = 1 with g = 1 at η = ½: O_L = 1, O_R = ¼, and N goes from 1 to ¼.

        >>> telescoped_residual((1.0, 0.25), (0.0, 0.0), 1, lr=0.5)
        0.75
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    norm_drift = norm_square[1] - norm_square[0]
    overlap_drift = overlap[1] - overlap[0]
    total = -(1 - momentum) * norm_drift / (2 * lr) - momentum * overlap_drift
    return total / ((1 - dampening) * steps)
