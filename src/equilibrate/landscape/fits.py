"""Fit a line to G(η): its slope, its range of validity, and the bias of reshuffled epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.landscape.points import Sweep, SweepPoint
from equilibrate.solvable import epoch_end_factor


@dataclass(frozen=True, slots=True)
class Departure:
    """The distance of G(η) at one learning rate from the line through all smaller rates."""

    lr: float
    """Learning rate η."""
    index: Estimate
    """The anharmonicity index, G(η)/(line) − 1."""

    @property
    def significant(self) -> bool:
        """Whether zero is outside the 95 % confidence interval of the index."""
        return not self.index.covers(0.0)


@dataclass(frozen=True, slots=True)
class Fit:
    """Properties of the loss landscape, computed from a sweep."""

    hessian_noise: Estimate
    """Tr(HC̃), from the slope of G at small η."""
    curvature: Estimate
    """Tr(HC̃)/Tr C̃, the curvature averaged over the directions of the noise."""
    linear_up_to: float
    """The largest η up to which no rate departs significantly from the line through those below."""
    departures: tuple[Departure, ...]
    """One for each rate above the smallest."""
    shuffling_factors: tuple[tuple[float, float], ...]
    """(η, F) for each rate, where F·G is measured at the ends of reshuffled epochs. F is a lower
    bound, and nan with momentum."""
    corrected: bool
    """Whether G was divided by F, as is done for sweeps with reshuffled epochs."""
    excluded: tuple[float, ...]
    """Rates at which FDR1 did not hold in time. They are not part of the fit."""
    unsettled: tuple[tuple[float, float], ...]
    """(η, L̄/R̄ − 1) for rates at which FDR1 exceeded the threshold during the measurement."""

    def summary(self) -> str:
        """Return a description of the fit in a few sentences, with all cautions first.

        Nothing is concluded about the shape of the loss if FDR1 did not hold during the measurement
        at one of the rates in the fit.
        """
        lines = []
        if self.unsettled:
            rates = ", ".join(f"{100 * off:+.3g} % at η = {lr:g}" for lr, off in self.unsettled)
            lines.append(
                f"Caution: FDR1 was off by {rates} during the measurement, so the run was not "
                "stationary there and the numbers below are not those of a stationary state. Use "
                "more epochs."
            )
        if self.excluded:
            rates = _join(self.excluded)
            lines.append(f"Excluded, because FDR1 did not hold in time: η = {rates}.")
        lines += [
            f"Slope of G at small η: Tr(HC̃) = {self.hessian_noise} "
            f"(95 %, {self.hessian_noise.method}).",
            f"Curvature along the noise: Tr(HC̃)/Tr C̃ = {self.curvature}.",
            self._conclusion(),
        ]
        if self.shuffling_factors and not math.isnan(self.shuffling_factors[0][1]):
            lr, factor = self.shuffling_factors[0]
            lines.append(
                f"At the ends of reshuffled epochs G is up to {100 * (1 - factor):z.0f} % too low "
                f"at η = {lr:g}. "
                + (
                    "G was divided by this factor, and the slope is an upper bound."
                    if self.corrected
                    else "This sweep used independent batches and has no such bias."
                )
            )
        return "\n".join(lines)

    def _conclusion(self) -> str:
        if self.unsettled:
            return "No conclusion about the shape of the loss: FDR1 must hold at all rates first."
        beyond = [d for d in self.departures if d.significant and d.lr > self.linear_up_to]
        if beyond:
            return (
                f"G is linear up to η = {self.linear_up_to:g}. At η = {beyond[0].lr:g} it departs "
                f"from the line by {100 * beyond[0].index.value:+.0f} ± "
                f"{100 * beyond[0].index.margin:.0f} %: the loss is not harmonic, or its noise is "
                "not constant, over the range of the fluctuations at this rate."
            )
        return (
            f"G is linear up to the largest rate, η = {self.linear_up_to:g}, within its errors: "
            "the data are consistent with a harmonic loss."
        )


class NotEquilibratedError(ValueError):
    """A sweep in which FDR1 held at fewer than two learning rates. Nothing can be concluded."""


def fit(sweep: Sweep) -> Fit:
    """Compute slope, curvature and anharmonicity from a sweep.

    Each seed gives its own G(η)/η, which is constant if G is linear. Confidence intervals are
    Student's, from the spread among seeds. The line starts with the smallest rate. The next rate is
    added as long as it does not depart from the mean of those before it at the 95 % level; a linear
    G fails this test at 5 % of the rates. To lowest order in η the slope is
    (1−ν)²Tr(HC̃)/(2(1−μ²)).

    With reshuffled epochs and no momentum G is first divided by F(h), the `epoch_end_factor` of a
    single mode whose curvature h is solved for at each rate. h·F(h) is a convex function of h. By
    Jensen's inequality a spectrum of several curvatures is reduced less than one mode at their
    mean, so the true slope lies between the uncorrected and the corrected one. With
    `sampling="independent"` no correction is needed.

    Args:
        sweep: A sweep in which FDR1 held at two learning rates or more.

    Returns:
        The fit, with error bars. A rate at which SGD diverged or has no noise raises a ValueError.

    Raises:
        NotEquilibratedError: If FDR1 held at fewer than two rates.

    Example:
        >>> points = [
        ...     SweepPoint(lr, (3 * lr, 3.1 * lr), (2.0, 2.0), 0.0, 9, 9, True) for lr in (0.1, 0.2)
        ... ]
        >>> found = fit(Sweep(tuple(points), 0.0, 0.0, "independent", 50, threshold=0.02))
        >>> round(found.hessian_noise.value, 6), found.linear_up_to
        (6.1, 0.2)
    """
    used = [point for point in sweep.points if point.equilibrated]
    if len(used) < 2:
        rest = [point for point in sweep.points if not point.equilibrated]
        off = ", ".join(f"{100 * p.residual:+.3g} % at η = {p.lr:g}" for p in rest)
        raise NotEquilibratedError(
            f"FDR1 held at {len(used)} of {len(sweep.points)} learning rates, but a fit needs at "
            f"least two. Where it did not, it was off by {off or 'an unknown amount'}, with a "
            f"threshold of {100 * sweep.threshold:.3g} %: use more epochs, or larger learning rates"
        )
    _check_points(used)
    shuffled = sweep.sampling == "shuffled" and sweep.momentum == 0
    scale = 2 * (1 - sweep.momentum**2) / (1 - sweep.dampening) ** 2
    slopes: list[Tensor] = []
    factors: list[float] = []
    for point in used:
        slope = scale * torch.tensor(point.fdr2_left, dtype=torch.float64) / point.lr
        factor = math.nan
        if sweep.momentum == 0:
            curvature = slope.mean().item() / _noise(point).mean().item()
            factor = _shuffling_factor(point, sweep, curvature, biased=shuffled)
        factors.append(factor)
        slopes.append(slope / factor if shuffled else slope)
    line, departures = [slopes[0]], []
    linear, linear_up_to = True, used[0].lr
    for point, slope in zip(used[1:], slopes[1:], strict=True):
        base = torch.stack(line).mean(0)
        departure = Departure(point.lr, estimates.ratio((slope - base)[None], base[None]))
        departures.append(departure)
        linear = linear and not departure.significant
        if linear:
            line.append(slope)
            linear_up_to = point.lr
    noises = torch.stack([_noise(point) for point in used[: len(line)]])
    slope = torch.stack(line).mean(0)[None]
    return Fit(
        estimates.mean(slope),
        estimates.ratio(slope, noises.mean(0)[None]),
        linear_up_to,
        tuple(departures),
        tuple((point.lr, factor) for point, factor in zip(used, factors, strict=True)),
        shuffled,
        tuple(point.lr for point in sweep.points if not point.equilibrated),
        tuple((p.lr, p.residual) for p in used if not abs(p.residual) < sweep.threshold),
    )


def _check_points(points: Sequence[SweepPoint]) -> None:
    """Check that SGD did not diverge, and that there is noise.

    Raises:
        ValueError: If one of the two fails at some point.
    """
    diverged = [p.lr for p in points if not all(map(math.isfinite, (*p.fdr2_left, *p.noise_trace)))]
    if diverged:
        raise ValueError(
            f"G or its noise is not finite at η = {_join(diverged)}, because SGD diverged: remove "
            "the largest rates"
        )
    noiseless = [p.lr for p in points if not any(p.noise_trace)]
    if noiseless:
        raise ValueError(
            f"there is no noise at η = {_join(noiseless)}, and so no fluctuation to measure: use "
            "batches smaller than the data"
        )


def _join(lrs: Sequence[float]) -> str:
    return ", ".join(f"{lr:g}" for lr in lrs)


def _noise(point: SweepPoint) -> Tensor:
    return torch.tensor(point.noise_trace, dtype=torch.float64)


def _shuffling_factor(point: SweepPoint, sweep: Sweep, curvature: float, *, biased: bool) -> float:
    """Return the `epoch_end_factor` F of one mode, from its measured curvature.

    A biased measurement is F(h)·h, which increases with h: h is found by bisection.
    """
    keep = 1 - sweep.dampening

    def factor(h: float) -> float:
        rate = min(point.lr * keep * max(h, 0.0), 1.0)
        return epoch_end_factor(rate, sweep.steps_per_epoch).item()

    if not biased:
        return factor(curvature)
    low, high = curvature, max(curvature, 1.0) + 12 / (sweep.steps_per_epoch * point.lr * keep)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if factor(middle) * middle < curvature else (low, middle)
    return factor(low)
