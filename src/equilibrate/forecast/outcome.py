r"""What a run would be worth after some more steps, from its past alone.

Three things decide where a run ends if its learning rate is changed now, at step t, and it is
trained for n more steps: the noise N that goes away, the progress that staying would make, and how
much of it is kept,

    loss = f(t + κn) − ρN

with the loss f of the constant learning rate. A linear cooldown to zero takes the noise away
(ρ = 1) and keeps two thirds of the progress (κ = 2/3); staying has κ = 1 and ρ = 0.

**The noise.** Along one mode of a quadratic with curvature h and for small learning rates, a linear
cooldown over n steps takes the stationary variance Σ to

    Σ ∫₀¹ exp(−xu²) du ≈ Σ / (1 + x/3),        x = ηhn/(1−μ)

and a running mean m of the parameters with a mean age of a steps has the variance Σ/(1 + xa/n). So
with a = n/3 the loss at the mean is the loss after the cooldown, whatever the curvatures are. While
the run makes progress the mean lags behind by its age:

    f(θ_t) − f(m_t) = N − [f(t − a) − f(t)]

On one mini-batch this difference has far less noise than either loss. From gradients alone,
½(θ − m)·g is N less half of that lag on a quadratic; networks are steeper, so N is a little less.
The mean ends n/3 steps of progress behind, which is what makes κ = 2/3. On a quadratic it would be
1/2; for networks 2/3 was measured.

A mean has one age, and cooldowns have many lengths: N grows slowly with n, as n^0.15 in what was
measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.forecast.progress import STARTS, Progress, fit, longest_agreeing

KEPT = 2 / 3
"""Share of the progress that a linear cooldown keeps."""
_LR_POWER = math.log(KEPT) / math.log(0.5)
"""Power of the mean learning rate with which progress slows down: a linear cooldown, whose mean is
a half, keeps two thirds of it."""
_AGE = 1 / 3
"""Mean age of a mean that has lost as much noise as after a cooldown, in units of its length."""
GROWTH = 0.15
"""Power of the length of a cooldown with which the noise grows that it removes."""
_STEEPNESS = 0.9
"""What ½(θ − m)·g is multiplied by: the loss is steeper than a quadratic along the fluctuations."""
_UNKNOWN, _UNEQUAL = 0.17, 0.15
"""Relative standard errors of the noise beyond those of the samples: because a cooldown is not just
a mean, and because of the steepness. Chosen such that 95 % intervals cover on the runs that the
forecast was tuned on."""
_FEWEST = 4
"""Samples without which there is no error bar."""


@dataclass(frozen=True)
class Samples:
    """A number that was measured at some steps, with the mean age of the parameters in the mean."""

    steps: np.ndarray
    values: np.ndarray
    ages: np.ndarray


@dataclass(frozen=True)
class History:
    """All that is known of a run at a constant learning rate."""

    step: int
    """Number of steps so far."""
    steps: np.ndarray
    """The middle of the steps of each mean loss."""
    losses: np.ndarray
    """Mean losses."""
    counts: np.ndarray
    """Number of losses in each mean."""
    products: Samples
    """(θ − m)·g."""
    differences: Samples
    """f(θ) − f(m) on one mini-batch."""


@dataclass(frozen=True)
class Outcomes:
    """Losses after n more steps, whatever happens to the learning rate."""

    horizon: int
    progress: Progress
    noise: Estimate
    """Excess loss that a linear cooldown over these steps removes."""

    def loss(self, kept: float, removed: float) -> Estimate:
        """Return the loss at the end.

        Args:
            kept: Share of the progress of staying, κ.
            removed: Share of the noise that goes away, ρ.
        """
        fallen = self.gain(kept, removed)
        return _estimate(
            self.progress.now - fallen.value, math.hypot(fallen.stderr, self.progress.stderr)
        )

    def gain(self, kept: float, removed: float, than: tuple[float, float] = (0, 0)) -> Estimate:
        """Return by how much the loss is lower than with other shares, by default than now."""
        step, horizon = self.progress.step, self.horizon
        fall, error = self.progress.fall(step + than[0] * horizon, step + kept * horizon)
        more = removed - than[1]
        return _estimate(
            fall + more * self.noise.value, math.hypot(error, more * self.noise.stderr)
        )


def shares(lr: float, batch: float) -> tuple[float, float]:
    """Return the shares of the progress that is kept and of the noise that goes away.

    Args:
        lr: By what the learning rate is multiplied.
        batch: By what the batch size is multiplied.

    Returns:
        The arguments of `Outcomes.loss`.
    """
    return lr**_LR_POWER, 1 - lr / batch


def outcomes(history: History, horizon: int) -> Outcomes | str:
    """Return what is known of the next steps.

    Args:
        history: The past.
        horizon: Number of steps to come, n.

    Returns:
        The outcomes, or the reason why there are none.
    """
    progress = fit(history.steps, history.losses, history.counts, history.step, horizon)
    if progress is None:
        return f"{int(history.counts.sum())} losses are too few"
    values = _noise(history.differences, progress, horizon)
    gradients = _noise(history.products, progress, horizon)
    parts = [
        (factor * part.value, factor * math.hypot(part.stderr, own * part.value))
        for part, factor, own in ((values, 1.0, 0.0), (gradients, _STEEPNESS / 2, _UNEQUAL))
        if part is not None
    ]
    if not parts:
        return "too few gradients were sampled that are finite and not zero"
    weights = np.array([1 / max(error, 1e-300) ** 2 for _, error in parts])
    value = float(weights @ [value for value, _ in parts] / weights.sum())
    error = math.hypot(weights.sum() ** -0.5, _UNKNOWN * value)
    return Outcomes(horizon, progress, _estimate(value, error))


def _noise(samples: Samples, progress: Progress, horizon: int) -> Estimate | None:
    """Return the mean of samples, each corrected for the lag of its mean and for its age."""

    def candidates() -> Iterator[tuple[float, float, Estimate]]:
        for share in STARTS:
            begin = max(share * progress.step, progress.start)
            chosen = (samples.steps >= begin) & np.isfinite(samples.values)
            values, steps, ages = (
                column[chosen] for column in (samples.values, samples.steps, samples.ages)
            )
            if len(values) < _FEWEST or not values.any():
                continue
            pairs = zip(steps.tolist(), ages.tolist(), strict=True)
            lags = [progress.fall(step - age, step)[0] for step, age in pairs]
            scale = (_AGE * horizon / np.maximum(ages, 1.0)) ** GROWTH
            mean = estimates.mean(torch.from_numpy((values + lags) * scale))
            yield mean.value, mean.stderr, mean

    return longest_agreeing(candidates())


def _estimate(value: float, stderr: float) -> Estimate:
    return Estimate(value, stderr, method="forecast")
