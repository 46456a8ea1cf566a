"""What lowering the learning rate would gain, and what staying gains: values with error bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equilibrate.estimates import Estimate

_BLOCKS = 20
"""Blocks into which a series is cut at least, if it is long enough."""
_FEWEST = 5
"""Blocks that a regression needs: two for the line, and some for its error."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What lowering the learning rate to zero over a number of steps would gain.

    The gain is the excess loss due to the noise of the parameters that the cooldown removes. It is
    what the cooldown gains over staying at the present learning rate. Staying gains something too
    while the loss still falls; the two add up to the fall of the loss during the cooldown.
    """

    horizon: int
    """Length of the cooldown, in steps."""
    gain: Estimate
    """Decrease of the training loss compared to staying; nan if `undefined`. Its error is that of
    the average over the window."""
    step: int
    """Number of steps so far."""
    undefined: str | None = None
    """The reason why there is no forecast, or None if there is one."""

    def __str__(self) -> str:
        if self.undefined is not None:
            return f"no forecast for a cooldown over {self.horizon} steps: {self.undefined}"
        return (
            f"lowering the learning rate to zero over the next {self.horizon} steps would gain "
            f"{self.gain} of training loss over staying"
        )

    def against(self, losses: Losses) -> str:
        """Return the forecast and what staying gains, in one sentence.

        Args:
            losses: Training losses up to now.

        Example:
            >>> values = tuple(1 - 0.01 * k + 0.001 * (-1) ** k for k in range(20))
            >>> losses = Losses(0, tuple(range(100, 2100, 100)), values)
            >>> sentence = Forecast(400, Estimate(0.076, 0.002), step=2000).against(losses)
            >>> print(sentence[-56:])
            over staying; staying gains 0.0402 ± 0.0011 in 400 steps
        """
        fall = losses.fall(losses.window(self.horizon))
        staying = (
            f"too few losses to tell what staying gains: {fall.method}"
            if math.isnan(fall.value)
            else f"staying gains {fall.scaled(self.horizon)} in {self.horizon} steps"
        )
        return f"{self}; {staying}"


@dataclass(frozen=True, slots=True)
class Losses:
    """Training losses that were handed over during training, since the last lowering.

    A loss is that of the last step or, better, the mean over the steps since the loss before it.
    """

    start: int
    """Number of steps when the first interval began."""
    steps: tuple[int, ...]
    """Number of steps when each loss was handed over."""
    values: tuple[float, ...]
    """The losses."""

    @property
    def elapsed(self) -> int:
        """Steps from `start` to the last loss."""
        return self.steps[-1] - self.start if self.steps else 0

    def window(self, horizon: int) -> int:
        """Return the step from which on losses tell of the present.

        It is the middle of the steps since the last lowering, or earlier if there are fewer than
        five losses after it, but no less than a horizon after the lowering: by then the gain of the
        lowering has been made.

        Args:
            horizon: Number of steps in which the noise relaxes.
        """
        fewest = (self.start, *self.steps)[-_FEWEST - 1] if len(self.steps) >= _FEWEST else 0
        return max(self.start + horizon, min(self.start + self.elapsed // 2, fewest))

    def fall(self, since: int) -> Estimate:
        """Estimate by how much the loss falls in a step, from a straight line through the losses.

        Losses are averaged in at least 20 blocks, if there are as many. The error is that of a
        linear regression, widened if successive residuals are positively correlated. A curve that
        flattens out falls more slowly than its line at the end.

        >>> line = Losses(0, tuple(range(10, 310, 10)), tuple(1 - 0.01 * k for k in range(30)))
        >>> print(f"{line.fall(since=100).value:.4f}")
        0.0010

        Args:
            since: Step from which on losses are used. Each must be of an interval after it.

        Returns:
            The estimate; nan, with the reason as its `method`, if there are fewer than five losses,
            all of them are of the same step, or one is not finite.
        """
        begins = (self.start, *self.steps[:-1])
        chosen = [i for i, begin in enumerate(begins) if begin >= since]
        if len(chosen) < _FEWEST:
            reason = f"{len(chosen)} of {_FEWEST} losses since step {since}"
            return Estimate(math.nan, math.nan, method=reason)
        middles = [(begins[i] + self.steps[i]) / 2 for i in chosen]
        if min(middles) == max(middles):
            return Estimate(math.nan, math.nan, method="all losses are of the same step")
        values = [self.values[i] for i in chosen]
        if not all(map(math.isfinite, values)):
            return Estimate(math.nan, math.nan, method="losses are not finite")
        line = _regress(blocks(middles), blocks(values))
        return line.scaled(-1)


def blocks(series: Sequence[float]) -> np.ndarray:
    """Return the means of blocks of equal length: all values if there are fewer than 40.

    The first values are left out if the length does not divide their number.

    >>> blocks([1.0, 2.0, 3.0]).tolist(), len(blocks(range(59))), len(blocks(range(1000)))
    ([1.0, 2.0, 3.0], 29, 20)

    Args:
        series: Numbers, in the order of time.

    Returns:
        Means of 20 to 39 blocks.
    """
    values = np.asarray(series, dtype=np.float64)
    length = max(1, len(values) // _BLOCKS)
    return values[len(values) % length :].reshape(-1, length).mean(1)


def average(samples: Sequence[float]) -> Estimate:
    """Estimate the mean of the samples of a forecast, with the error of the mean of their blocks.

    Samples have the noise of single mini-batches, which is independent from step to step, and are
    correlated by the motion of the parameters over no more than the horizon.

    Args:
        samples: At least two samples, in the order of time.

    Returns:
        The estimate.
    """
    means = blocks(samples)
    used = len(samples) // len(means) * len(means)
    return Estimate(
        float(np.mean(samples)),
        float(means.std(ddof=1)) / math.sqrt(len(means) * len(samples) / used),
        dof=len(means) - 1,
        count=len(samples),
        method=f"{len(means)} blocks of {len(samples) // len(means)} samples",
    )


def _regress(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Return the slope of a straight line through points, with its error."""
    count = len(x)
    x = x - x.mean()
    square = float(x @ x)
    slope = float(x @ y) / square
    residuals = y - y.mean() - slope * x
    total = float(residuals @ residuals)
    variance = total / (count - 2) / square
    lagged = float(residuals[1:] @ residuals[:-1]) / total if total else 0.0
    # The estimate of a correlation is low by about 1/count for each fitted parameter and one more.
    correlation = min(max(0.0, lagged + 3 / count), 0.9)
    widened = (1 + correlation) / (1 - correlation)  # as if there were fewer points by this factor
    return Estimate(
        slope,
        math.sqrt(variance * widened),
        dof=min(count - 2, max(_FEWEST - 2, (count - 2) / widened)),
        count=count,
        method="regression",
    )
