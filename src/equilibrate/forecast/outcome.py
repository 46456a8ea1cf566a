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
½(θ − m)·g is N less half of that lag on a quadratic; in networks it is a tenth to a quarter too
high. On a quadratic progress goes as the sum of the learning rates, so a cooldown would keep
κ = 1/2. The mean, which is n/3 steps behind, keeps two thirds, and so does a cooldown in networks:
with the realised progress put in, 18 cooldowns of language models gained 1.04 N and kept 0.67 of
it, with a mean deviation of 4 %.

**The noise at present.** The samples are from the later half of the steps, in which the loss falls,
and with it the noise of its gradient, whose variance is about proportional to the loss. Each sample
is multiplied by the loss now over that of its step. This matters where the loss falls fast: on
GPT-2 124M it lowers the noise by 11 to 23 %.

The steps at which losses are compared, one in some 50, may by chance have more noise than others.
½(θ − m)·g is known of each of these and of many steps between them, and differs from step to step
as f(θ) − f(m) does: their correlation was 0.74 to 0.94 in networks. So it serves as a control
variate: N is the regression of the differences on it, where it has its mean over all steps. That
lowers the error of N by a fifth to a half, and needs neither a steepness nor gradients that are not
clipped.

A mean has one age, and cooldowns have many lengths: N grows slowly with n, as n^0.2 in what was
measured.

**Other learning rates and batch sizes.** If the learning rate is multiplied by r and the batch size
by s, the noise N is multiplied by r/s, and with it falls the loss that it is proportional to: where
N is the share p of the loss,

    1 − ρ = (r/s)(1 − p) / (1 − p r/s)

With r = s each step does what s steps did, so κ is s there. A linear cooldown, whose mean rate is a
half, keeps two thirds. Powers of r and s that have both are κ = r^0.585 s^0.415.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.forecast.progress import Progress, fit

KEPT = 2 / 3
"""Share of the progress that a linear cooldown keeps."""
_LR_POWER = math.log(KEPT) / math.log(0.5)
"""Power of the mean learning rate with which progress slows down: a linear cooldown, whose mean is
a half, keeps two thirds of it."""
_LARGEST = 0.5
"""Largest share of the loss that noise is taken to be, where it changes with the loss."""
_AGE = 1 / 3
"""Mean age of a mean that has lost as much noise as after a cooldown, in units of its length."""
GROWTH = 0.2
"""Power of the length of a cooldown with which the noise grows that it removes."""
_STEEPNESS = 0.8
"""What ½(θ − m)·g is multiplied by: the loss is steeper than a quadratic along the fluctuations."""
_STEEPNESS_ERROR, _NOISE_ERROR, _KEPT_ERROR = 0.15, 0.25, 0.1
"""Standard errors beyond those of samples and losses: of the steepness and of the noise, as shares
of them, because a cooldown is not just a mean; and of κ. Cooldowns removed as much noise as the
mean tells in language models and MLPs, and 1.2 to 1.4 times that in networks for images."""
FEWEST = 4
"""Samples without which there is no error bar."""
_NORMAL = 1.96
"""Quantile of the normal distribution: few samples have the larger one of Student's."""


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
    """(θ − m)·g, at steps that are counted from 0."""
    differences: Samples
    """f(θ) − f(m) on the mini-batch of a step, at steps that are counted from 0."""


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
        loss, error = self.progress.loss(self.progress.step + kept * self.horizon)
        unsure = _doubt(kept) * self.progress.fall_over(self.horizon)
        return _estimate(
            loss - removed * self.noise.value,
            math.hypot(error, unsure, removed * self.noise.stderr),
        )

    def gain(self, kept: float, removed: float, than: tuple[float, float] = (0, 0)) -> Estimate:
        """Return by how much the loss is lower than with other shares, by default than now."""
        step, horizon = self.progress.step, self.horizon
        fall, error = self.progress.fall(step + than[0] * horizon, step + kept * horizon)
        more = removed - than[1]
        unsure = (_doubt(kept) - _doubt(than[0])) * self.progress.fall_over(horizon)
        return _estimate(
            fall + more * self.noise.value, math.hypot(error, unsure, more * self.noise.stderr)
        )

    def changed(self, lr: float, batch: float) -> tuple[float, float]:
        """Return the shares of the progress and of the noise, κ and ρ, after a change.

        Args:
            lr: By what the learning rate is multiplied.
            batch: By what the batch size is multiplied.

        Returns:
            The arguments of `loss` and `gain`.
        """
        rate, now = lr / batch, self.progress.now
        part = self.noise.value / now if now > 0 else 0.0
        part = min(max(part, 0.0), _LARGEST / max(1.0, rate))
        left = rate * (1 - part) / (1 - rate * part)
        return lr**_LR_POWER * batch ** (1 - _LR_POWER), 1 - left


def _doubt(kept: float) -> float:
    """Return the standard error of a share of the progress: none of staying, none of stopping."""
    return _KEPT_ERROR * kept * (1 - kept) / (KEPT * (1 - KEPT))


def outcomes(history: History, horizon: int) -> Outcomes | str:
    """Return what is known of the next steps.

    Args:
        history: The past.
        horizon: Number of steps to come, n.

    Returns:
        The outcomes, or the reason why there are none.
    """
    progress = fit(history.steps, history.losses, history.counts, history.step)
    if progress is None:
        return f"{int(history.counts.sum())} losses are too few"
    compared, sampled = (
        _noises(samples, progress, horizon) for samples in (history.differences, history.products)
    )
    if len(compared.values) >= FEWEST:
        noise, relative = _controlled(compared, sampled), _NOISE_ERROR
    elif len(sampled.values) >= FEWEST:
        noise = _mean(sampled).scaled(_STEEPNESS / 2)
        relative = math.hypot(_NOISE_ERROR, _STEEPNESS_ERROR)
    else:
        found = len(sampled.values)
        return (
            f"it needs {FEWEST} samples of gradients that are finite and not zero, and has {found}"
        )
    error = math.hypot(noise.stderr, relative * noise.value)
    return Outcomes(horizon, progress, _estimate(noise.value, error))


class _Series(NamedTuple):
    """Values at increasing steps."""

    steps: np.ndarray
    values: np.ndarray


def _noises(samples: Samples, progress: Progress, horizon: int) -> _Series:
    """Return the noise in the later half of the steps, corrected for lag and age of the mean.

    Of products it is twice the noise. There is none if all are zero, as of parameters that nothing
    trains.
    """
    chosen = np.flatnonzero((samples.steps >= progress.step / 2) & np.isfinite(samples.values))
    chosen = chosen[np.argsort(samples.steps[chosen])]  # the log is a ring
    steps, values, ages = (a[chosen] for a in (samples.steps, samples.values, samples.ages))
    if not values.any():
        return _Series(steps[:0], values[:0])
    curve = progress.past(steps)
    lag = progress.past(steps - ages) - curve
    return _Series(steps, (values + lag) * _scale(horizon, ages) * _fallen(progress.now, curve))


def _controlled(compared: _Series, sampled: _Series) -> Estimate:
    """Return the mean noise of comparisons, with samples at more steps as a control variate.

    Args:
        compared: What was found.
        sampled: Twice what gradients say.
    """
    _, i, j = np.intersect1d(compared.steps, sampled.steps, return_indices=True)
    if (n := len(i)) < FEWEST:
        return _mean(compared)
    control, noise = _mean(sampled), compared.values[i]
    excess = sampled.values[j] - control.value
    spread = excess - excess.mean()
    square = max(float(spread @ spread), 1e-300)
    slope = float(spread @ noise) / square
    found = _mean(_Series(compared.steps[i], noise - slope * excess))
    # Of an intercept, whose line is known from as many points, and of the mean of the control.
    line = found.stderr * math.sqrt((n - 1) / (n - 2) * (1 + n * excess.mean() ** 2 / square))
    return _estimate(found.value, math.hypot(line, slope * control.stderr))


def _mean(series: _Series) -> Estimate:
    """Return the mean over time, with an error whose normal interval is that of Student's quantile.

    Each value stands for the steps around it, because first steps are sampled more densely.
    """
    value = np.average(series.values, weights=np.gradient(series.steps))
    margin = estimates.mean(torch.from_numpy(series.values)).margin
    return _estimate(float(value), margin / _NORMAL)


def _scale(horizon: int, ages: np.ndarray) -> np.ndarray:
    """Return by what the noise of means of some ages differs from that of a cooldown."""
    return (_AGE * horizon / np.maximum(ages, 1.0)) ** GROWTH


def _fallen(now: float, losses: np.ndarray) -> np.ndarray:
    """Return by what the noise has changed since some losses: by as much as the loss, if positive.

    At most by a factor of two: a loss near zero, or one that has an offset, tells nothing.
    """
    ratios = now / np.where(losses > 0, losses, 1.0)
    return np.where((losses > 0) & (now > 0), np.clip(ratios, 0.5, 2.0), 1.0)


def _estimate(value: float, stderr: float) -> Estimate:
    return Estimate(value, stderr, method="forecast")
