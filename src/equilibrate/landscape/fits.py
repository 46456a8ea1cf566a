"""What G(η) says of the landscape: its slope, where it bends, and what reshuffling hid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.landscape.sweeps import RateReading, Sweep
from equilibrate.solvable import epoch_end_factor


@dataclass(frozen=True, slots=True)
class Departure:
    """How far G(η) is from the straight line through the origin and all smaller rates."""

    lr: float
    index: Estimate
    """The anharmonicity index G(η)/(line) − 1."""

    @property
    def bends(self) -> bool:
        """Whether zero is outside the 95 % interval of the index."""
        return not self.index.covers(0.0)


@dataclass(frozen=True, slots=True)
class Fit:
    """The landscape as the fluctuations show it."""

    hessian_noise: Estimate
    """Tr(HC̃), from the slope of G at small η."""
    curvature: Estimate
    """Tr(HC̃)/Tr C̃, the Hessian averaged over the directions of the noise."""
    linear_up_to: float
    """The largest η up to which no rate departs from the line of those below it."""
    departures: tuple[Departure, ...]
    """One for each rate above the smallest."""
    shuffling: tuple[tuple[float, float], ...]
    """(η, factor): what the ends of reshuffled epochs show of G, at least; nan with momentum."""
    corrected: bool
    """Whether G was divided by these factors, as data taken from reshuffled epochs are."""
    left_out: tuple[float, ...]
    """Rates at which FDR1 was not reached in time."""
    unsettled: tuple[tuple[float, float], ...]
    """(η, L̄/R̄ − 1) where FDR1 was off by more than the tolerance over the epochs measured."""

    def summary(self) -> str:
        """The fit in plain words."""
        lines = [
            f"Slope of G at small η: Tr(HC̃) = {self.hessian_noise} "
            f"(95 %, {self.hessian_noise.method}).",
            f"Hessian seen by the noise: Tr(HC̃)/Tr C̃ = {self.curvature}.",
        ]
        bent = [d for d in self.departures if d.bends and d.lr > self.linear_up_to]
        if bent:
            lines.append(
                f"G is linear up to η = {self.linear_up_to:g}; at η = {bent[0].lr:g} it departs "
                f"from the line by {100 * bent[0].index.value:+.0f} ± "
                f"{100 * bent[0].index.margin:.0f} %: the loss is not harmonic, or its noise not "
                "constant, over the distance that SGD wanders there."
            )
        else:
            lines.append(
                f"G is linear up to the largest η measured, {self.linear_up_to:g}, within its "
                "errors: nothing speaks against the harmonic picture."
            )
        if self.shuffling and not math.isnan(self.shuffling[0][1]):
            lr, factor = self.shuffling[0]
            lines.append(
                f"Read at the ends of reshuffled epochs, G is up to {100 * (1 - factor):z.0f} % "
                f"too low at η = {lr:g}"
                + (
                    "; it was divided by that, and the slope is an upper bound."
                    if self.corrected
                    else "; this reading, with independent batches, is not."
                )
            )
        if self.left_out:
            rates = _listed(self.left_out)
            lines.append(f"Left out, since FDR1 did not hold in time: η = {rates}.")
        if self.unsettled:
            rates = ", ".join(f"{100 * off:+.0f} % at η = {lr:g}" for lr, off in self.unsettled)
            lines.append(
                f"FDR1 was off by {rates} while G was measured: that may not be the stationary "
                "state; give more epochs."
            )
        return "\n".join(lines)


def fit(sweep: Sweep) -> Fit:
    """Read slope, curvature and anharmonicity off a sweep.

    Each seed gives its own G(η)/η, which is constant where G is linear; intervals are Student's,
    from the spread among seeds. Starting with the smallest rate, the line takes in the next as long
    as this does not depart from the mean of those before it, a test that errs in 5 % of the rates.
    To lowest order in η the slope is (1−ν)²Tr(HC̃)/(2(1−μ²)).

    With reshuffled epochs and no momentum G is first divided by F(h), `epoch_end_factor` of a
    single mode whose curvature h is solved for at each rate. h·F(h) is a convex function of h, so
    that by Jensen's inequality a spectrum of several curvatures loses less than one mode at their
    mean: the true slope lies between the one without the correction and the one with it.
    `sampling="independent"` needs none.

    >>> rates = [
    ...     RateReading(lr, (3 * lr, 3.1 * lr), (2.0, 2.0), 0.0, 9, 9, True) for lr in (0.1, 0.2)
    ... ]
    >>> found = fit(Sweep(tuple(rates), 0.0, 0.0, "independent", batches=50, tolerance=0.02))
    >>> round(found.hessian_noise.value, 6), found.linear_up_to
    (6.1, 0.2)
    """
    used = [rate for rate in sweep.rates if rate.equilibrated]
    if len(used) < 2:
        raise ValueError(
            f"FDR1 held at {len(used)} of {len(sweep.rates)} learning rates, and a fit needs two: "
            "give max_epochs more, or leave out the smallest rates"
        )
    _refuse_unreadable(used)
    shuffled = sweep.sampling == "shuffled" and sweep.momentum == 0
    scale = 2 * (1 - sweep.momentum**2) / (1 - sweep.dampening) ** 2
    slopes: list[Tensor] = []
    factors: list[float] = []
    for rate in used:
        slope = scale * torch.tensor(rate.second_left, dtype=torch.float64) / rate.lr
        factor = math.nan
        if sweep.momentum == 0:
            factor = _factor(
                rate, sweep, slope.mean().item() / _noise(rate).mean().item(), shuffled
            )
        factors.append(factor)
        slopes.append(slope / factor if shuffled else slope)
    line, departures = [slopes[0]], []
    straight, up_to = True, used[0].lr
    for rate, slope in zip(used[1:], slopes[1:], strict=True):
        base = torch.stack(line).mean(0)
        found = Departure(rate.lr, estimates.ratio((slope - base)[None], base[None]))
        departures.append(found)
        straight = straight and not found.bends
        if straight:
            line.append(slope)
            up_to = rate.lr
    noises = torch.stack([_noise(rate) for rate in used[: len(line)]])
    slope = torch.stack(line).mean(0)[None]
    return Fit(
        estimates.mean(slope),
        estimates.ratio(slope, noises.mean(0)[None]),
        up_to,
        tuple(departures),
        tuple((rate.lr, factor) for rate, factor in zip(used, factors, strict=True)),
        shuffled,
        tuple(rate.lr for rate in sweep.rates if not rate.equilibrated),
        tuple(
            (rate.lr, rate.residual) for rate in used if not abs(rate.residual) < sweep.tolerance
        ),
    )


def _refuse_unreadable(rates: Sequence[RateReading]) -> None:
    """What cannot be fitted: rates at which SGD diverged, or at which there is no noise."""
    wild = [r.lr for r in rates if not all(map(math.isfinite, (*r.second_left, *r.noise_trace)))]
    if wild:
        raise ValueError(
            f"G or its noise is not finite at η = {_listed(wild)}, since SGD diverged: leave the "
            "largest rates out"
        )
    still = [r.lr for r in rates if not any(r.noise_trace)]
    if still:
        raise ValueError(
            f"there is no noise at η = {_listed(still)}, and so nothing to read: take batches "
            "smaller than the data"
        )


def _listed(lrs: Sequence[float]) -> str:
    return ", ".join(f"{lr:g}" for lr in lrs)


def _noise(rate: RateReading) -> Tensor:
    return torch.tensor(rate.noise_trace, dtype=torch.float64)


def _factor(rate: RateReading, sweep: Sweep, curvature: float, biased: bool) -> float:
    """`epoch_end_factor` of one mode, from the curvature that was read, itself biased or not.

    A biased reading is factor(h)·h, which increases with h: h is bisected.
    """
    keep = 1 - sweep.dampening

    def factor(h: float) -> float:
        return epoch_end_factor(min(rate.lr * keep * max(h, 0.0), 1.0), sweep.batches).item()

    if not biased:
        return factor(curvature)
    low, high = curvature, max(curvature, 1.0) + 12 / (sweep.batches * rate.lr * keep)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if factor(middle) * middle < curvature else (low, middle)
    return factor(low)
