"""How the loss falls at a constant learning rate, from its past alone.

Losses of mini-batches are noisy, and a training slows down. A slope over a short time is uncertain,
and a straight line over a long one is wrong. Over a window that ends now the loss is taken as

    f(u) = f(t) − b · (1 − (u/t)^−p)/p            (p = 0: the logarithm)

The power p is hardly known from a window, so curves with several powers are averaged, each with the
weight that the losses give it. Neither is it known how far back the losses obey one law: the window
is the longest of three that agrees with the shorter ones, as in Lepski's method.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
_POWERS = (-0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
STARTS = (0.75, 0.6, 0.5)
"""Beginnings of windows as shares of the steps so far."""
_GROUPS = 40
"""Into how many groups the losses of a window are cut at most."""
_FEWEST = 8
"""Groups that a curve needs: two for itself, and some for its error."""
_WIDENED = 1.5
"""By how much the error of a curve is larger than the scatter around it tells: the law itself is
not known. Chosen such that 95 % intervals cover on the runs that the forecast was tuned on."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The loss as a function of the steps, at a constant learning rate."""

    step: float
    """The present, in steps."""
    start: float
    """Where the window begins that the curve was fitted to."""
    now: float
    """The loss at present."""
    stderr: float
    """Its standard error."""
    fits: tuple[tuple[float, float, float, float], ...]
    """Power, weight, b and its standard error of each curve."""

    def fall(self, begin: float, end: float) -> tuple[float, float]:
        """Return by how much the loss falls from one step to another, and its standard error."""
        begin, end = max(begin, 0.05 * self.step), max(end, 0.05 * self.step)
        terms = [
            (weight, b * span, error * span)
            for power, weight, b, error in self.fits
            for span in [_bend(end / self.step, power) - _bend(begin / self.step, power)]
        ]
        value = sum(weight * fall for weight, fall, _ in terms)
        variance = sum(weight * ((fall - value) ** 2 + se**2) for weight, fall, se in terms)
        return float(value), _WIDENED * math.sqrt(variance)


def fit(
    steps: np.ndarray, losses: np.ndarray, counts: np.ndarray, step: int, ahead: float
) -> Progress | None:
    """Return the curve through the losses so far.

    Args:
        steps: The middle of the steps of each mean loss.
        losses: Mean losses.
        counts: Number of losses in each mean.
        step: Number of steps so far.
        ahead: By how many steps the curve will be continued. The windows must agree on the fall of
            the loss over them.

    Returns:
        The curve; None if there are too few losses.
    """

    def candidates() -> Iterator[tuple[float, float, Progress]]:
        for share in STARTS:
            inside = steps > share * step
            found = _fit_window(steps[inside], losses[inside], counts[inside], step)
            if found is not None:
                value, error = found.fall(step, step + ahead)
                yield value, error / _WIDENED, found

    return longest_agreeing(candidates())


def longest_agreeing(candidates: Iterable[tuple[float, float, T]]) -> T | None:
    """Return the candidate of the longest window that agrees with those of all shorter ones.

    A longer window has less noise, a shorter one less bias. This is Lepski's method: windows become
    longer until their interval of one standard error has no point in common with the others.

    Args:
        candidates: A value, its standard error and what to return, the shortest window first.
    """
    best, low, high = None, -math.inf, math.inf
    for value, error, found in candidates:
        low, high = max(low, value - error), min(high, value + error)
        if low > high:
            break
        best = found
    return best


def _fit_window(
    steps: np.ndarray, losses: np.ndarray, counts: np.ndarray, step: int
) -> Progress | None:
    """Return the curve through the losses of one window."""
    if len(steps) < _FEWEST:
        return None
    place = np.cumsum(counts) - counts / 2
    group = (place * min(_GROUPS, len(steps)) / counts.sum()).astype(int)
    weight = np.bincount(group, weights=counts)
    used = weight > 0
    weight = weight[used]
    x = np.bincount(group, weights=counts * steps)[used] / weight / step
    y = np.bincount(group, weights=counts * losses)[used] / weight
    if len(x) < _FEWEST:
        return None
    fits, squares, nows = [], [], []
    for power in _POWERS:
        bends = _bend(x, power)
        middle, level = np.average(bends, weights=weight), np.average(y, weights=weight)
        spread = float(weight @ (bends - middle) ** 2)
        b = -float(weight @ ((bends - middle) * y)) / spread
        residuals = y - level + b * (bends - middle)
        square = float(weight @ residuals**2)
        variance = square / (len(x) - 2)
        nows.append((level + b * middle, variance * (1 / weight.sum() + middle**2 / spread)))
        fits.append((power, b, math.sqrt(variance / spread)))
        squares.append(square)
    # Bayes: the likelihood of each power, and one as the power that a priori is most likely.
    chances = -len(x) / 2 * np.log(np.maximum(squares, 1e-300))
    chances -= (np.array(_POWERS) - 1) ** 2 / 2
    shares = np.exp(chances - chances.max())
    shares /= shares.sum()
    now = float(shares @ [value for value, _ in nows])
    variance = float(shares @ [(value - now) ** 2 + var for value, var in nows])
    return Progress(
        step=float(step),
        start=float(x[0] * step),
        now=now,
        stderr=math.sqrt(variance),
        fits=tuple(
            (power, float(share), b, error)
            for share, (power, b, error) in zip(shares, fits, strict=True)
        ),
    )


def _bend(x: Any, power: float) -> Any:
    """Return (1 − x^−p)/p of a number or of many, which is log x for p = 0."""
    return np.log(x) if power == 0 else (1 - x**-power) / power
