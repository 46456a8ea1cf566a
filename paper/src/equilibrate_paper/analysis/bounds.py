"""Bounds on measured values, and how they are printed.

A bound is compared with the confidence interval of a value, not with the value alone. Its text is
made from its numbers, so that what is printed is what was applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from equilibrate.estimates import Estimate
from equilibrate_paper.analysis import measures
from equilibrate_paper.analysis.results import Result
from equilibrate_paper.analysis.seeds import CONFIDENCE


class Bound(Protocol):
    """A condition on a measured value."""

    def decide(self, measured: Estimate, results: Sequence[Result]) -> bool | None:
        """Decide whether a value satisfies the bound.

        Args:
            measured: The value with its confidence interval.
            results: The runs from which it was measured.

        Returns:
            True if the whole interval satisfies the bound, False if all of it violates the bound,
            and None if the interval is undefined or does not decide.
        """
        ...

    def text(self, quantity: str, data: str) -> str:
        """Describe the bound on a quantity.

        Args:
            quantity: What is measured, in words.
            data: Name of the data set on which it is measured.

        Returns:
            The text, such as "|x| < 0.05".
        """
        ...


@dataclass(frozen=True)
class Interval:
    """The value lies between two numbers.

    >>> Interval(-0.05, 0.05).text("x", "mnist"), Interval(low=0).text("x", "mnist")
    ('|x| < 0.05', 'x > 0')
    """

    low: float = -math.inf
    """Lower end."""
    high: float = math.inf
    """Upper end."""

    def decide(self, measured: Estimate, results: Sequence[Result] = ()) -> bool | None:
        """Return whether the confidence interval lies between the ends; see `Bound.decide`."""
        if math.isnan(measured.margin):
            return None
        low, high = measured.interval
        if low > self.low and high < self.high:
            return True
        if high <= self.low or low >= self.high:
            return False
        return None

    def text(self, quantity: str, data: str) -> str:
        """Return the condition on `quantity`; see `Bound.text`."""
        if self.low == -self.high:
            return f"|{quantity}| < {self.high:g}"
        if self.high == math.inf:
            return f"{quantity} > {self.low:g}"
        if self.low == -math.inf:
            return f"{quantity} < {self.high:g}"
        return f"{self.low:g} < {quantity} < {self.high:g}"


@dataclass(frozen=True)
class SamplingErrors:
    """The difference of two accuracies is not resolved by the test images.

    It is smaller than k√(2p(1−p)/n), k sampling errors of a difference of two accuracies p on n
    test images.
    """

    accuracy: Callable[..., float]
    """Measures p from the results of the claim's runs."""
    count: int = 2
    """The number k of sampling errors."""

    def decide(self, measured: Estimate, results: Sequence[Result]) -> bool | None:
        """Return whether the confidence interval is within the limit; see `Bound.decide`."""
        data = results[0].run.task.data
        error = measures.sampling_error(self.accuracy(*results), data)
        limit = self.count * math.sqrt(2) * error
        return Interval(-limit, limit).decide(measured)

    def text(self, quantity: str, data: str) -> str:
        """Return the condition on `quantity`, with the number of images; see `Bound.text`."""
        return f"|{quantity}| < {self.count} √(2p(1−p)/{measures.TEST_IMAGES[data]})"


@dataclass(frozen=True)
class Agreement:
    """The confidence interval covers zero, and is narrow enough to exclude large differences."""

    resolution: float
    """The whole interval has to lie within ± this number."""
    comparisons: int
    """Number of comparisons that share one error probability."""

    def decide(self, measured: Estimate, results: Sequence[Result] = ()) -> bool | None:
        """Return False if zero is excluded, True if all large differences are, else None."""
        if math.isnan(measured.margin):
            return None
        if not measured.covers(0.0):
            return False
        return abs(measured.value) + measured.margin < self.resolution or None

    def text(self, quantity: str, data: str) -> str:
        """Return the condition on `quantity`; see `Bound.text`."""
        return (
            f"{quantity}: the interval covers 0, at {100 * CONFIDENCE:g} % for all "
            f"{self.comparisons} comparisons together, and stays within ± {self.resolution:g}"
        )
