"""Estimates of means and ratios over seeds."""

from __future__ import annotations

import math

import numpy as np
import torch

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate_paper.analysis.results import Array

CONFIDENCE = 0.95
"""Confidence level of all intervals, unless several comparisons share one."""


def mean_over_seeds(values: Array, confidence: float = CONFIDENCE) -> Estimate:
    """Estimate a mean from independent values, with Student's interval.

    >>> found = mean_over_seeds(np.array([1.0, 2.0, 3.0]))
    >>> round(found.value, 3), round(found.margin, 3)  # t(0.975, 2) = 4.303, s/√n = 0.577
    (2.0, 2.484)

    Args:
        values: One value for each seed.
        confidence: Confidence level of the interval.

    Returns:
        The estimate. Its error is nan for one seed; without seeds its value is nan, too.
    """
    if not len(values):
        return Estimate(math.nan, math.nan, confidence=confidence)
    samples = torch.from_numpy(np.ascontiguousarray(values))
    return estimates.mean(samples, independent=True, confidence=confidence)


def ratio_over_seeds(numerator: Array, denominator: Array) -> Estimate:
    """Estimate the ratio of two means over the same seeds.

    Fluctuations of a seed that numerator and denominator have in common cancel.

    >>> found = ratio_over_seeds(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]))
    >>> found.value, found.margin
    (0.5, 0.0)

    Args:
        numerator: One value for each seed.
        denominator: One value for each of the same seeds.

    Returns:
        The estimate.
    """
    samples = (torch.from_numpy(np.ascontiguousarray(v)) for v in (numerator, denominator))
    return estimates.ratio(*samples, independent=True, confidence=CONFIDENCE)
