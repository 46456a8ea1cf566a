"""Estimates of means with confidence intervals.

Successive steps of SGD are correlated, so the spread of single samples underestimates the error of
their mean. One long run is cut into batches whose means are nearly independent; the means of
several runs are independent already.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from torch import Tensor

_BATCHES = 20
"""At least so many batches: enough that Student's quantile is near the normal one, few enough that
each batch is long."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated number with its standard error and confidence interval.

    The interval is value ± t·stderr, where t is the quantile of Student's distribution with `dof`
    degrees of freedom.

    >>> tenth = Estimate(0.1, 0.002, dof=19)
    >>> print(tenth)
    0.1000 ± 0.0042
    >>> tenth.covers(0.103)
    True
    """

    value: float
    """The estimated number."""
    stderr: float
    """Standard error of `value`; nan if there are too few samples to estimate it."""
    _: KW_ONLY
    dof: float = math.inf
    """Degrees of freedom of `stderr`."""
    confidence: float = 0.95
    """Confidence level of `margin` and `interval`."""
    count: int = 0
    """Number of samples that were averaged."""
    method: str = ""
    """How `stderr` was estimated, for people to read."""
    margin: float = math.nan
    """Half the width of the confidence interval; Student's if not given."""

    def __post_init__(self) -> None:
        if math.isnan(self.margin):
            margin = student_quantile(self.confidence, self.dof) * self.stderr
            object.__setattr__(self, "margin", margin)

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end of the confidence interval."""
        return self.value - self.margin, self.value + self.margin

    def covers(self, truth: float) -> bool:
        """Check whether the confidence interval contains a number.

        Args:
            truth: The number to look for.

        Returns:
            True if `truth` lies in `interval`; False also if the interval is undefined.
        """
        return abs(self.value - truth) <= self.margin

    def scaled(self, factor: float) -> Estimate:
        """Estimate `factor` times the number.

        >>> Estimate(3.0, 0.5).scaled(-2).stderr
        1.0

        Args:
            factor: An exactly known number.

        Returns:
            The estimate of the product.
        """
        size = abs(factor)
        return replace(
            self,
            value=factor * self.value,
            stderr=size * self.stderr,
            margin=size * self.margin,
        )

    def shifted(self, offset: float) -> Estimate:
        """Estimate the number plus `offset`.

        Args:
            offset: An exactly known number.

        Returns:
            The estimate of the sum, with the same error.
        """
        return replace(self, value=self.value + offset)

    def minus(self, other: Estimate) -> Estimate:
        """Estimate the difference to an independently estimated number.

        Standard errors and margins add in squares. Each margin has its own Student quantile, so
        the interval is at least as wide as Welch's.

        >>> print(Estimate(3.0, 0.3).minus(Estimate(2.0, 0.4)))
        1.00 ± 0.98

        Args:
            other: An independent estimate.

        Returns:
            The estimate of the difference.
        """
        return self._combined(other, self.value - other.value, 1.0, 1.0)

    def over(self, other: Estimate) -> Estimate:
        """Estimate the quotient with an independently estimated number.

        Relative errors add in squares, to first order. Each margin has its own Student quantile,
        as in `minus`.

        >>> print(Estimate(3.0, 0.3).over(Estimate(2.0, 0.0)))
        1.50 ± 0.29

        Args:
            other: An independent estimate whose error is small compared with its value.

        Returns:
            The estimate of the quotient.
        """
        quotient = self.value / other.value
        return self._combined(other, quotient, 1 / abs(other.value), quotient / abs(other.value))

    def _combined(self, other: Estimate, value: float, own: float, others: float) -> Estimate:
        """Return the estimate of a function of both with these derivatives."""
        return Estimate(
            value,
            math.hypot(own * self.stderr, others * other.stderr),
            margin=math.hypot(own * self.margin, others * other.margin),
            dof=min(self.dof, other.dof),
            confidence=min(self.confidence, other.confidence),
            count=self.count + other.count,
            method=self.method if self.method == other.method else "combined",
        )

    def __str__(self) -> str:
        if not (math.isfinite(self.margin) and self.margin > 0):
            return f"{self.value:.4g} ± {self.margin:g}"
        # Two digits of the margin, and the value to the same place.
        exponent = math.floor(math.log10(self.margin))
        if not -5 <= exponent <= 5:
            return f"{self.value:.4g} ± {self.margin:.2g}"
        places = max(0, 1 - exponent)
        return f"{self.value:.{places}f} ± {self.margin:.{places}f}"


def batch_means(series: Tensor) -> Tensor:
    """Return the means of 20 to 39 batches of successive steps, or the steps if fewer than 40.

    All batches have the same length; steps that are left over are left out at the beginning.

    >>> import torch
    >>> batch_means(torch.arange(43.0))[:3].tolist(), len(batch_means(torch.arange(1000.0)))
    ([1.5, 3.5, 5.5], 20)

    Args:
        series: One run of shape (steps,).

    Returns:
        The means, in double precision.
    """
    length = max(1, len(series) // _BATCHES)
    return series[len(series) % length :].double().view(-1, length).mean(1)


def mean(samples: Tensor, *, independent: bool = False, confidence: float = 0.95) -> Estimate:
    """Estimate the mean of a stationary series by batch means.

    For one run, the standard error is taken from the spread of the `batch_means`. This is correct
    if a batch is much longer than the correlation time τ; otherwise the interval is too narrow by
    about τ/(2·batch length). For several runs, the standard error is taken from the spread of the
    means of the runs, whatever the correlations within each.

    >>> import torch
    >>> series = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    >>> mean(series).covers(0.0), mean(series).method
    (True, '20 batches of 50 steps')

    Args:
        samples: One run of shape (steps,), or several of shape (steps, runs). Other shapes, and
            empty tensors, raise a `ValueError`.
        independent: Whether the steps of one run are independent samples.
        confidence: Confidence level of the interval.

    Returns:
        The estimate of the mean.
    """
    return _estimate(samples, samples, samples.double().mean().item(), independent, confidence)


def ratio(
    numerator: Tensor,
    denominator: Tensor,
    *,
    independent: bool = False,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the ratio of the means of two series that were measured together.

    The error of r = ā/b̄ is that of the mean of (a − rb)/b̄, to first order in the fluctuations of
    b̄. Fluctuations that both series have in common cancel.

    >>> import torch
    >>> b = 1 + torch.rand(1000, generator=torch.Generator().manual_seed(0))
    >>> ratio(3 * b, b).stderr < 1e-7 < mean(3 * b).stderr
    True

    Args:
        numerator: The series a, of a shape that `mean` accepts.
        denominator: The series b, of the same shape.
        independent: Whether the steps of one run are independent samples.
        confidence: Confidence level of the interval.

    Returns:
        The estimate of ā/b̄.

    Raises:
        ValueError: If the shapes differ.
    """
    if numerator.shape != denominator.shape:
        raise ValueError(
            f"numerator and denominator must have the same shape, got "
            f"{tuple(numerator.shape)} and {tuple(denominator.shape)}"
        )
    a, b = numerator.double(), denominator.double()
    scale = b.mean()
    value = a.mean() / scale
    return _estimate(a, (a - value * b) / scale, value.item(), independent, confidence)


def _estimate(
    samples: Tensor, deviations: Tensor, value: float, independent: bool, confidence: float
) -> Estimate:
    """Return an estimate whose error is that of the mean of `deviations`.

    Raises:
        ValueError: If `samples` is empty or has more than two dimensions.
    """
    if samples.ndim not in (1, 2) or samples.numel() == 0:
        raise ValueError(
            "samples must have shape (steps,) or (steps, runs) and at least one entry, got "
            f"{tuple(samples.shape)}"
        )
    steps, runs = len(samples), samples[0].numel()
    if runs > 1:
        means, parts = deviations.double().mean(0), runs
        method = f"{runs} runs of {steps} steps" if steps > 1 else f"{runs} runs"
    elif independent:
        means, parts = deviations.double().reshape(-1), steps
        method = f"{steps} independent samples"
    else:
        means = batch_means(deviations.reshape(-1))
        length = steps // len(means)
        parts = steps / length  # those left out of the batches count too
        method = f"{len(means)} batches of {length} steps"
    stderr = (means.std() / math.sqrt(parts)).item() if len(means) > 1 else math.nan
    return Estimate(
        value,
        stderr,
        dof=max(1, len(means) - 1),
        confidence=confidence,
        count=samples.numel(),
        method=method,
    )


def telescoping_mean(change: float, potential: Tensor) -> Estimate:
    """Estimate the mean of differences that telescope, Σ(a_t − b_t) = Φ_0 − Φ_n.

    Such a mean has no long-run variance. Its error falls as 1/n: it is √(2 Var Φ)/n once n exceeds
    the correlation time. Batch means of the differences would overestimate it.

    >>> import torch
    >>> phi = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    >>> telescoping_mean((phi[0] - phi[-1]).item(), phi[:-1]).stderr < 0.0015
    True

    Args:
        change: Φ_0 − Φ_n.
        potential: The n values Φ_0 … Φ_{n−1} of one run, at least two.

    Returns:
        The estimate of the mean difference per step.

    Raises:
        ValueError: If `potential` is not a series of at least two steps.
    """
    if potential.ndim != 1 or len(potential) < 2:
        raise ValueError(
            f"potential must be a series of at least 2 steps, got {tuple(potential.shape)}"
        )
    steps = len(potential)
    stderr = math.sqrt(2) * potential.double().std().item() / steps
    return Estimate(change / steps, stderr, count=steps, method="spread of the potential")


@lru_cache
def student_quantile(confidence: float, dof: float) -> float:
    """Compute the t with P(|T| < t) = `confidence` for Student's distribution.

    With t = √n tan φ, the probability is a finite sum of powers of cos φ for every integer n, and
    increases with φ. The equation is solved by bisection, so that the core does not need scipy.

    >>> print(f"{student_quantile(0.95, 19):.4f}")
    2.0930

    Args:
        confidence: Probability of the two-sided interval, between 0 and 1.
        dof: Degrees of freedom, at least 1. A fraction is rounded down, which widens the interval.
            Above 1000 the normal quantile is used.

    Returns:
        The quantile t.

    Raises:
        ValueError: If `confidence` or `dof` is out of range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, such as 0.95, got {confidence}")
    if not dof >= 1:
        raise ValueError(f"dof must be at least 1, got {dof}")
    if dof > 1000:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    n = math.floor(dof)
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _probability(middle, n) < confidence else (low, middle)
    return math.sqrt(n) * math.tan(low)


def _probability(angle: float, dof: int) -> float:
    """Return P(|T| < √n tan φ) for n = `dof`."""
    odd = dof % 2
    square = math.cos(angle) ** 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, dof + 1, 2):
        total += term
        term *= square * (k - 1) / k
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total
