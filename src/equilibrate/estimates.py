"""Averages with honest error bars: a value, its standard error, and how both were found.

Successive steps of SGD are correlated, so the spread of single values says little about the error
of their mean. One long run is cut into batches whose means are nearly independent; several runs
are independent as they stand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from torch import Tensor

_BATCHES = 20
"""Enough that Student's quantile is near the normal one, few enough that each batch is long."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured number: `value` with its standard error.

    >>> tenth = Estimate(0.1, error=0.002, count=400, how="by hand", freedom=19)
    >>> print(tenth)
    0.1000 ± 0.0042
    >>> tenth.covers(0.103)
    True
    """

    value: float
    error: float
    """One standard deviation of `value`; nan where there are too few samples to tell."""
    count: int
    """Samples averaged over."""
    how: str
    freedom: float = math.inf
    """Degrees of freedom behind `error`; Student's quantile is taken with it."""

    @property
    def margin(self) -> float:
        """Half the width of the 95 % confidence interval."""
        return student_quantile(0.95, self.freedom) * self.error

    def covers(self, truth: float) -> bool:
        """Whether the 95 % confidence interval contains `truth`."""
        return abs(self.value - truth) <= self.margin

    def agrees(self, other: Estimate) -> bool:
        """Whether the difference to an independent estimate is within its 95 % interval."""
        return abs(self.value - other.value) <= math.hypot(self.margin, other.margin)

    def scaled(self, factor: float) -> Estimate:
        """The estimate of `factor` times the quantity.

        >>> Estimate(3.0, 0.5, 10, "by hand").scaled(-2).error
        1.0
        """
        error = abs(factor) * self.error
        return Estimate(factor * self.value, error, self.count, self.how, self.freedom)

    def __str__(self) -> str:
        if not (math.isfinite(self.margin) and self.margin > 0):
            return f"{self.value:.4g} ± {self.margin:g}"
        # Two digits of the margin, and the value to the same place.
        exponent = math.floor(math.log10(self.margin))
        if not -5 <= exponent <= 5:
            return f"{self.value:.4g} ± {self.margin:.2g}"
        places = max(0, 1 - exponent)
        return f"{self.value:.{places}f} ± {self.margin:.{places}f}"


def mean(samples: Tensor, *, independent: bool = False) -> Estimate:
    """The mean of a stationary series of shape (steps,), or of several runs, (steps, runs).

    One run: the series is cut into 20 batches of equal length and the error taken from the spread
    of their means, with Student's quantile. That is right once a batch is much longer than the
    correlation time τ; the interval is too narrow by about τ/(2·batch length). Several runs: the
    error comes from the spread of the runs' means, whatever the correlations inside each. Samples
    said to be `independent`, or fewer than 40, are taken as they stand.

    >>> import torch
    >>> series = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    >>> mean(series).covers(0.0), mean(series).how
    (True, '20 batches of 50 steps')
    """
    return _estimate(samples, samples, samples.double().mean().item(), independent)


def ratio(numerator: Tensor, denominator: Tensor, *, independent: bool = False) -> Estimate:
    """⟨numerator⟩/⟨denominator⟩ of two series measured together, as `mean` takes them.

    The error of r = a/b is that of the mean of (a − rb)/b̄, to first order in the fluctuations of
    b̄, so that what the two have in common cancels.

    >>> import torch
    >>> b = 1 + torch.rand(1000, generator=torch.Generator().manual_seed(0))
    >>> ratio(3 * b, b).error < 1e-7 < mean(3 * b).error
    True
    """
    if numerator.shape != denominator.shape:
        raise ValueError(
            f"numerator and denominator must be measured together, got shapes "
            f"{tuple(numerator.shape)} and {tuple(denominator.shape)}"
        )
    a, b = numerator.double(), denominator.double()
    scale = b.mean()
    value = a.mean() / scale
    return _estimate(a, (a - value * b) / scale, value.item(), independent)


def _estimate(samples: Tensor, deviations: Tensor, value: float, independent: bool) -> Estimate:
    if samples.ndim not in (1, 2) or samples.numel() == 0:
        raise ValueError(
            f"samples must have shape (steps,) or (steps, runs), got {tuple(samples.shape)}"
        )
    steps, runs = len(samples), samples[0].numel()
    if runs > 1:
        means = deviations.double().mean(0)
        how = f"{runs} runs of {steps} steps" if steps > 1 else f"{runs} runs"
    elif independent:
        means, how = deviations.double().reshape(-1), f"{steps} independent draws"
    else:
        batches = _BATCHES if steps >= 2 * _BATCHES else steps  # too short a series to cut up
        length = steps // batches
        tail = deviations.reshape(-1)[-batches * length :]
        means = tail.double().view(batches, length).mean(1)
        how = f"{batches} batches of {length} steps"
    parts = len(means)
    error = (means.std() / math.sqrt(parts)).item() if parts > 1 else math.nan
    return Estimate(value, error, samples.numel(), how, max(1, parts - 1))


def of_drift(change: float, potential: Tensor) -> Estimate:
    """The mean of differences that telescope, Σ(a_t − b_t) = Φ_0 − Φ_n, from the series of Φ.

    Such a mean has no long-run variance: its error falls as 1/n, √(2 Var Φ)/n once n exceeds the
    correlation time, and batch means of the differences would be far too wide. `change` is
    Φ_0 − Φ_n and `potential` the n values Φ_0 … Φ_{n−1} of one run.

    >>> import torch
    >>> phi = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    >>> of_drift((phi[0] - phi[-1]).item(), phi[:-1]).error < 0.0015
    True
    """
    if potential.ndim != 1 or len(potential) < 2:
        raise ValueError(
            f"potential must be a series of at least 2 steps, got {tuple(potential.shape)}"
        )
    steps = len(potential)
    error = math.sqrt(2) * potential.double().std().item() / steps
    return Estimate(change / steps, error, steps, "spread of what telescopes")


@lru_cache
def student_quantile(confidence: float, freedom: float) -> float:
    """The t with P(|T| < t) = `confidence` for Student's distribution; normal beyond 1,000.

    Written out, since the core does without scipy: with t = √n tan φ the probability is a finite
    sum of powers of cos φ for every whole n = `freedom`, increasing in φ, and is bisected.

    >>> print(f"{student_quantile(0.95, 19):.4f}")
    2.0930
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, such as 0.95, got {confidence}")
    if not freedom >= 1:
        raise ValueError(f"freedom must be at least 1, got {freedom}")
    if freedom > 1000:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    n = math.floor(freedom)
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _within(middle, n) < confidence else (low, middle)
    return math.sqrt(n) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """P(|T| < √n tan φ) for n = `freedom`."""
    odd = freedom % 2
    square = math.cos(angle) ** 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= square * (k - 1) / k
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total
