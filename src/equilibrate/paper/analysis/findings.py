"""What was measured for a claim, and whether it lies where it should."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from equilibrate.paper.analysis import measures
from equilibrate.paper.analysis.measures import END
from equilibrate.paper.analysis.results import Array, Result, Tread
from equilibrate.paper.analysis.statistics import CONFIDENCE, Estimate, estimate, quotient

MEETING = 0.05
STRAIGHT = 0.2
VANISHING = 0.5
PRECISE = 0.01


class Bound(Protocol):
    """What a measured value is held to."""

    def decides(self, measured: Estimate) -> bool | None:
        """True: it surely holds; False: it surely does not; None: the runs cannot tell."""
        ...


@dataclass(frozen=True)
class Inside:
    """The interval from `low` to `high` in which the measured value is to lie."""

    low: float = -math.inf
    high: float = math.inf

    def decides(self, measured: Estimate) -> bool | None:
        """True: surely inside; False: surely outside; None: the interval straddles an end."""
        if math.isnan(measured.half_width):
            return None
        if measured.low > self.low and measured.high < self.high:
            return True
        if measured.high <= self.low or measured.low >= self.high:
            return False
        return None


@dataclass(frozen=True)
class Agreement:
    """No difference: the interval covers zero, and is narrow enough for that to mean something."""

    resolution: float

    def decides(self, measured: Estimate) -> bool | None:
        """False: zero is outside the interval; True: it is inside, and all of it near zero."""
        if math.isnan(measured.half_width):
            return None
        if abs(measured.mean) > measured.half_width:
            return False
        return abs(measured.mean) + measured.half_width < self.resolution or None


@dataclass(frozen=True)
class Finding:
    """A measured value and what it is held to."""

    measured: Estimate
    bound: Bound


def _worst(estimates: Sequence[Estimate], bound: Bound) -> Finding:
    """The one that is furthest out for sure or, where none is out, the one that comes nearest."""
    out = [e for e in estimates if bound.decides(e) is False]
    reach = {e: -e.half_width if out else np.nan_to_num(e.half_width) for e in out or estimates}
    return Finding(max(reach, key=lambda e: abs(e.mean) + reach[e]), bound)


def meets(result: Result) -> Finding | None:
    """L̄/R̄ − 1 at the end, at the learning rate whose interval reaches furthest from zero."""
    found = [estimate(measures.residual(tread)) for tread in measures.finished(result)]
    return _worst(found, Inside(-MEETING, MEETING)) if found else None


def slows(result: Result) -> Finding | None:
    """The slope of log(meeting time) against log η, fitted for each seed."""
    fit = measures.relaxation_power(measures.finished(result))
    return None if fit is None else Finding(estimate(fit[0]), Inside(high=0.0))


def vanishes(result: Result) -> Finding | None:
    """What is left of O_FB at the smallest learning rate, of that at the largest."""
    lrs, values = measures.landscape(result)
    if len(lrs) < 2:
        return None
    return Finding(quotient(values[0], values[-1]), Inside(-VANISHING, VANISHING))


def linear_below(largest: float) -> Callable[[Result], Finding | None]:
    """How far O_FB/η is from its value at the smallest η, where that reaches furthest."""

    def measure(result: Result) -> Finding | None:
        found = measures.departures(result, largest)
        return _worst(found, Inside(-STRAIGHT, STRAIGHT)) if found else None

    return measure


def bent_at(lr: float) -> Callable[[Result], Finding | None]:
    """How far O_FB/η at `lr` is from its value at the smallest η."""

    def measure(result: Result) -> Finding | None:
        found = measures.departures(result, lr)
        if not found:
            return None
        return Finding(Estimate(abs(found[-1].mean), found[-1].half_width), Inside(low=STRAIGHT))

    return measure


def lowered(shuffled: Result, independent: Result) -> Finding | None:
    """O_FB/η with reshuffled batches over that with independent ones, less one, at small η."""
    both = [measures.landscape(result) for result in (shuffled, independent)]
    common = np.intersect1d(both[0][0], both[1][0])[:3]
    if len(common) < 3:
        return None
    first, second = (
        estimate((values[np.isin(lrs, common)] / common[:, None]).mean(0)) for lrs, values in both
    )
    ratio = first.over(second)
    return Finding(Estimate(ratio.mean - 1, ratio.half_width), Inside(high=0.0))


def difference(
    first: tuple[int, str], second: tuple[int, str], part: slice, inside: Inside | None
) -> Callable[..., Finding | None]:
    """Accuracy of one arm less that of another, paired by initial seed.

    With no interval given, they are to be no further apart than the test images can tell.
    """

    def measure(*results: Result) -> Finding | None:
        pair = results[first[0]], results[second[0]]
        a = measures.accuracy(pair[0], first[1], part)
        b = measures.accuracy(pair[1], second[1], part)
        found = estimate(measures.by_seed(*pair, a, b))
        return Finding(found, inside or _indistinct(float(b.mean()), results[0]))

    return measure


def _indistinct(accuracy: float, result: Result) -> Inside:
    """Twice the sampling error of a difference of two accuracies on the test images."""
    width = 2 * math.sqrt(2) * measures.sampling_error(accuracy, result.run.task.data)
    return Inside(-width, width)


def spread(grid: Result, schedules: Result) -> Finding | None:
    """The best final accuracy of the grid less the worst, with the seeds' spread as its error."""
    found = measures.grid(grid).accuracy
    seeds = estimate(measures.accuracy(schedules, "adaptive", END))
    # Of a difference of two single runs: √2 s t, where the interval of a mean has s t/√n.
    error = seeds.half_width * math.sqrt(2 * len(schedules.run.seeds))
    return Finding(
        Estimate(float(found.max() - found.min()), error), _indistinct(float(found.mean()), grid)
    )


COMPARISONS = 6
"""One further precision for the MLP and two for the CNN, two quantities each."""
Quantity = Callable[[Tread], Array]
"""One value for each seed."""


def same_residual(single: Result, *others: Result) -> Finding | None:
    """The largest difference of L̄/R̄ − 1 to its value in single precision."""
    return _compared(measures.residual, Agreement(PRECISE), single, *others)


def same_landscape(single: Result, *others: Result) -> Finding | None:
    """The largest difference of O_FB to its value in single precision, in units of the latter."""
    treads = measures.finished(single)
    if not treads:
        return None
    unit = float(treads[0].last("landscape").mean())
    return _compared(
        lambda tread: tread.last("landscape") / unit, Agreement(STRAIGHT), single, *others
    )


def _compared(quantity: Quantity, bound: Bound, single: Result, *others: Result) -> Finding | None:
    treads = [measures.finished(result) for result in (single, *others)]
    if not all(treads):
        return None
    first, *further = (each[0] for each in treads)
    return _worst([paired(first, tread, quantity) for tread in further], bound)


def paired(single: Tread, other: Tread, quantity: Quantity) -> Estimate:
    """The difference to single precision, paired by seed; one chance of error for all of them."""
    confidence = 1 - (1 - CONFIDENCE) / COMPARISONS
    pair = other.result, single.result
    found = measures.by_seed(*pair, quantity(other), quantity(single))
    return estimate(found, confidence)
