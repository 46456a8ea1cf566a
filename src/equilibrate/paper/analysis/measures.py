"""Numbers read off the records: what figures show, tables list and claims are held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibrate.paper.analysis.results import Array, Result, Tread
from equilibrate.paper.analysis.statistics import Estimate, estimate, quotient
from equilibrate.paper.protocol.run import Adaptive

RELAXED = 0.1
"""How near to each other the sides of FDR1 have to stay for a tread to have relaxed."""
END = slice(0.95, None)
BEGINNING = slice(None, 0.125)
SMOOTH = 5
"""Epochs over which an accuracy is averaged before it is asked whether it has arrived."""

PRECISIONS = {"fp32": "single", "tf32": "TF32", "fp16": "half"}
"""What people call the precision of products."""

_TEST_IMAGES = {"mnist": 10_000, "cifar10": 10_000, "digits": 297}


def finished(result: Result) -> list[Tread]:
    """The treads that are recorded to their ends."""
    return [tread for tread in result.treads() if tread.finished]


def by_seed(first: Result, second: Result, a: Array, b: Array) -> Array:
    """The differences a − b of the seeds that both runs have, from values of all their own."""
    _, here, there = np.intersect1d(first.run.seeds, second.run.seeds, return_indices=True)
    return a[here] - b[there]


# FDR1 -----------------------------------------------------------------------------------------


def residual(tread: Tread) -> Array:
    """L̄/R̄ − 1 at the end of a tread, for each seed."""
    return tread.last("left") / tread.last("right") - 1


def meeting_times(tread: Tread) -> Array:
    """Epochs after which |L̄/R̄ − 1| < 0.1 for the rest of the tread; nan where never.

    >>> import types
    >>> sides = {"left": np.array([[3.0], [1.2], [1.05], [1.0]]), "right": np.ones((4, 1))}
    >>> tread = types.SimpleNamespace(time=np.arange(1.0, 5.0), column=sides.get)
    >>> meeting_times(tread)
    array([3.])
    """
    near = np.abs(tread.column("left") / tread.column("right") - 1) < RELAXED
    return _settled(tread.time, near)


def _settled(time: Array, there: NDArray[np.bool_]) -> Array:
    """The first time from which on it is `there`, for each column; nan where not in the end."""
    staying = np.cumprod(there[::-1], axis=0)[::-1].astype(bool)
    return np.where(staying[-1], time[np.argmax(staying, axis=0)], np.nan)


def geometric(values: Array) -> tuple[float, float, float]:
    """The geometric mean over seeds and its 95 % interval: times span decades.

    >>> print(["%.2g" % value for value in geometric(np.array([1.0, 10.0, 100.0]))])
    ['10', '0.033', '3e+03']
    """
    logs = estimate(np.log(values))
    return math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high)


def relaxation_power(treads: Sequence[Tread]) -> tuple[Array, Array] | None:
    """(p, log c) of a fit c·η^p to the meeting times, for each seed; None with less than two η.

    A learning rate at which a seed's sides have not met says nothing but "longer", and is left out.
    """
    times = {tread.lr: meeting_times(tread) for tread in treads}
    met = {lr: np.log(values) for lr, values in times.items() if not np.isnan(values).any()}
    if len(met) < 2:
        return None
    power, log_scale = np.polyfit(np.log([*met]), np.array([*met.values()]), 1)
    return power, log_scale


# FDR2 -----------------------------------------------------------------------------------------


def landscape(result: Result) -> tuple[Array, Array]:
    """Learning rates from small to large, and O_FB of shape (learning rates, seeds)."""
    treads = sorted(finished(result), key=lambda tread: tread.lr)
    return np.array([t.lr for t in treads]), np.array([t.last("landscape") for t in treads])


def departures(result: Result, largest: float) -> list[Estimate]:
    """How far O_FB/η is from its value at the smallest η, for each further η up to `largest`."""
    lrs, values = landscape(result)
    small = lrs <= largest * (1 + 1e-9)
    per_lr = values[small] / lrs[small, None]
    if len(per_lr) < 2:
        return []
    quotients = [quotient(row, per_lr[0]) for row in per_lr[1:]]
    return [Estimate(q.mean - 1, q.half_width) for q in quotients]


def reshuffled_product(momentum: float, batches: int) -> float:
    """⟨v·ξ⟩/Tr C, of the velocity before a step and the noise ξ of its batch, in reshuffled epochs.

    The noises of an epoch's M batches sum to zero, so that ⟨ξ_t·ξ_s⟩ = −Tr C/(M−1), and v holds
    −Σ μ^(k−1) ξ_(t−k) as far back as the epoch goes:

        [1 − (1−μ^M)/(M(1−μ))] / ((1−μ)(M−1))

    on average over the epoch, for modes that are slower than it; for faster ones it is less. With
    independent batches it is zero.

    >>> print(f"{reshuffled_product(0.9, batches=500):.5f}")
    0.01964
    """
    memory = (1 - (1 - momentum**batches) / (batches * (1 - momentum))) / (1 - momentum)
    return memory / (batches - 1)


def reshuffling_offset(tread: Tread) -> float:
    """What reshuffling takes at most from the second term of O_FB: −μ⟨v·ξ⟩, all modes being slow.

    Tr C is 2(1−μ)R̄/η to lowest order in η.
    """
    momentum, last = tread.result.run.momentum, tread.result.rows[-1]
    trace = 2 * (1 - momentum) * float(tread.last("right").mean()) / tread.lr
    batches = round(last["step"] / last["epoch"])
    return -momentum * reshuffled_product(momentum, batches) * trace


# Schedules ------------------------------------------------------------------------------------


def accuracy(result: Result, arm: str, part: slice, name: str = "test_accuracy") -> Array:
    """The accuracy of each seed, averaged over a part of the epochs, at least one of them."""
    _, values = result.measured(name, arm)
    count = len(values)
    start = min(round((part.start or 0.0) * count), count - 1)
    stop = max(1, round((part.stop or 1.0) * count))
    return values[start:stop].mean(0) if count else np.array([])


def sampling_error(accuracy: float, data: str) -> float:
    """√(p(1−p)/n), the standard error of an accuracy p on the n test images of a data set.

    >>> round(sampling_error(0.5, "mnist"), 6)
    0.005
    """
    return math.sqrt(accuracy * (1 - accuracy) / _TEST_IMAGES[data])


def arrival(result: Result, arm: str) -> Array:
    """The first epoch from which on the test accuracy stays at its final value, for each seed.

    The final value p is the mean over the last twentieth of the epochs; "at" is within 2√(p(1−p)/n)
    of it, two sampling errors on n test images; and the accuracy is averaged over the latest five
    epochs (or as many as there are), so that one epoch's noise does not count as leaving. nan where
    it is not there in the end.
    """
    epoch, values = result.measured("test_accuracy", arm)
    final = accuracy(result, arm, END)
    sums = np.concatenate([np.zeros((1, len(final))), np.cumsum(values, axis=0)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - SMOOTH, 0)
    smooth = (sums[ends] - sums[starts]) / (ends - starts)[:, None]
    width = np.array([2 * sampling_error(p, result.run.task.data) for p in final])
    return _settled(epoch, np.abs(smooth - final) <= width)


@dataclass(frozen=True, eq=False)
class Grid:
    """The adaptive schedule over X (rows) and Y (columns): means over seeds."""

    tolerances: tuple[float, ...]
    decreases: tuple[float, ...]
    accuracy: Array
    arrival: Array


def grid(result: Result) -> Grid:
    """Final test accuracy and the epoch of arrival at it, for each X and Y."""
    arms = {
        (s.tolerance, s.decrease): arm
        for arm, s in result.run.arms.items()
        if isinstance(s, Adaptive)
    }
    xs, ys = (tuple(sorted({pair[k] for pair in arms})) for k in (0, 1))
    final = [[accuracy(result, arms[x, y], END).mean() for y in ys] for x in xs]
    epochs = [[arrival(result, arms[x, y]).mean() for y in ys] for x in xs]
    return Grid(xs, ys, np.array(final), np.array(epochs))
