"""Fit a line to G(η): its slope and its range of validity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.landscape.sweeps import Sweep


@dataclass(frozen=True, slots=True)
class Fit:
    """Properties of the loss landscape, computed from a sweep."""

    hessian_noise: Estimate
    """Tr(HC̃), from the slope of G at small η."""
    curvature: Estimate
    """Tr(HC̃)/Tr C̃, the curvature averaged over the directions of the noise."""
    linear_up_to: float
    """The largest η up to which no rate departs significantly from the line through those below."""
    departures: dict[float, Estimate]
    """The anharmonicity index G(η)/(line through all smaller rates) − 1 at each η above the
    smallest. G departs significantly where zero is outside the confidence interval."""
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
        return "\n".join(lines)

    def _conclusion(self) -> str:
        if self.unsettled:
            return "No conclusion about the shape of the loss: FDR1 must hold at all rates first."
        beyond = [lr for lr in self.departures if lr > self.linear_up_to]
        if beyond:
            percent = self.departures[beyond[0]].scaled(100)
            return (
                f"G is linear up to η = {self.linear_up_to:g}. At η = {beyond[0]:g} it departs "
                f"from the line by {percent.value:+.0f} ± {percent.margin:.0f} %: the loss is not "
                "harmonic, or its noise is not constant, over the range of the fluctuations at "
                "this rate."
            )
        return (
            f"G is linear up to the largest rate, η = {self.linear_up_to:g}, within its errors: "
            "the data are consistent with a harmonic loss."
        )


def fit(sweep: Sweep) -> Fit:
    """Compute slope, curvature and anharmonicity from a sweep.

    Each seed gives its own G(η)/η, which is constant if G is linear. Confidence intervals are
    Student's, from the spread among seeds. The line starts with the smallest rate. The next rate is
    added as long as it does not depart from the mean of those before it at the 95 % level; a linear
    G fails this test at 5 % of the rates. To lowest order in η the slope is
    (1−ν)²Tr(HC̃)/(2(1−μ²)).

    Args:
        sweep: A sweep in which FDR1 held at two learning rates or more.

    Returns:
        The fit, with error bars.

    Raises:
        ValueError: If FDR1 held at fewer than two rates, or there is no noise at one of them.

    Example:
        >>> from equilibrate.landscape import SweepPoint
        >>> points = [
        ...     SweepPoint(lr, (3 * lr, 3.1 * lr), (2.0, 2.0), 0.0, 9, 9, True) for lr in (0.1, 0.2)
        ... ]
        >>> found = fit(Sweep(tuple(points), 0.0, 0.0, threshold=0.02))
        >>> round(found.hessian_noise.value, 6), found.linear_up_to
        (6.1, 0.2)
    """
    used = [point for point in sweep.points if point.equilibrated]
    if len(used) < 2:
        rest = [point for point in sweep.points if not point.equilibrated]
        off = ", ".join(f"{100 * p.residual:+.3g} % at η = {p.lr:g}" for p in rest)
        raise ValueError(
            f"FDR1 held at {len(used)} of {len(sweep.points)} learning rates, but a fit needs at "
            f"least two. Where it did not, it was off by {off or 'an unknown amount'}, with a "
            f"threshold of {100 * sweep.threshold:.3g} %: use more epochs, or larger learning rates"
        )
    noiseless = [point.lr for point in used if not any(point.noise_trace)]
    if noiseless:
        raise ValueError(
            f"there is no noise at η = {_join(noiseless)}, and so no fluctuation to measure: use "
            "batches smaller than the data"
        )
    scale = 2 * (1 - sweep.momentum**2) / (1 - sweep.dampening) ** 2
    line: list[Tensor] = []
    departures: dict[float, Estimate] = {}
    linear_up_to, linear = used[0].lr, True
    for point in used:
        slope = scale * torch.tensor(point.fdr2_left, dtype=torch.float64) / point.lr
        if line:
            base = torch.stack(line).mean(0)
            departures[point.lr] = estimates.ratio((slope - base)[None], base[None])
            linear = linear and departures[point.lr].covers(0.0)
        if linear:
            line.append(slope)
            linear_up_to = point.lr
    noises = torch.tensor([point.noise_trace for point in used[: len(line)]], dtype=torch.float64)
    slope = torch.stack(line).mean(0)[None]
    return Fit(
        estimates.mean(slope),
        estimates.ratio(slope, noises.mean(0)[None]),
        linear_up_to,
        departures,
        tuple(point.lr for point in sweep.points if not point.equilibrated),
        tuple((p.lr, p.residual) for p in used if not abs(p.residual) < sweep.threshold),
    )


def _join(lrs: Sequence[float]) -> str:
    return ", ".join(f"{lr:g}" for lr in lrs)
