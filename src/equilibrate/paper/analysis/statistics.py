"""Means over seeds with intervals that say how few seeds there were."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from equilibrate.estimates import student_quantile
from equilibrate.paper.analysis.results import Array

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and half the width of its 95 % interval (nan with one seed)."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half_width

    def over(self, other: Estimate) -> Estimate:
        """The quotient of two independent means: relative errors add in squares.

        Each has its own Student quantile, so that the interval is at least as wide as Welch's.

        >>> Estimate(3.0, 0.3).over(Estimate(2.0, 0.0))
        Estimate(mean=1.5, half_width=0.15)
        """
        ratio = self.mean / other.mean
        error = math.hypot(self.half_width, ratio * other.half_width) / abs(other.mean)
        return Estimate(ratio, error)


def estimate(values: Array, confidence: float = CONFIDENCE) -> Estimate:
    """Student's interval: mean ± t s/√n with n − 1 degrees of freedom.

    >>> e = estimate(np.array([1.0, 2.0, 3.0]))
    >>> round(e.mean, 3), round(e.half_width, 3)  # t(0.975, 2) = 4.303, s/√n = 0.577
    (2.0, 2.484)
    """
    n = len(values)
    mean = float(np.mean(values)) if n else math.nan
    if n < 2:
        return Estimate(mean, math.nan)
    quantile = student_quantile(confidence, n - 1)
    return Estimate(mean, quantile * float(np.std(values, ddof=1)) / math.sqrt(n))


def quotient(first: Array, second: Array) -> Estimate:
    """The quotient of two means over the same seeds: q = x̄/ȳ ± that of the mean of (x − qy)/ȳ.

    What a seed has in common at two learning rates is no error of their quotient.

    >>> quotient(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]))
    Estimate(mean=0.5, half_width=0.0)
    """
    ratio = float(np.mean(first) / np.mean(second))
    rest = estimate((first - ratio * second) / np.mean(second))
    return Estimate(ratio, rest.half_width)
