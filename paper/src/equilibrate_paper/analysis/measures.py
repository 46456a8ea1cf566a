"""Numbers computed from the records, for figures, tables and claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibrate.estimates import Estimate
from equilibrate_paper.analysis.results import Array, Phase, Result
from equilibrate_paper.analysis.seeds import mean_over_seeds, ratio_over_seeds
from equilibrate_paper.protocol.schedules import Adaptive

RELAXED = 0.1
"""A phase has relaxed when |L̄/R̄ − 1| stays below this number."""
END = slice(0.95, None)
"""The fraction of the epochs over which a final accuracy is averaged."""
BEGINNING = slice(None, 0.125)
"""The fraction of the epochs over which an early accuracy is averaged."""
SMOOTHING = 5
"""Epochs over which an accuracy is averaged before it is compared with its final value."""

PRECISIONS = {"fp32": "single", "tf32": "TF32", "fp16": "half"}
"""Names of the precisions of products, for people."""
TEST_IMAGES = {"mnist": 10_000, "cifar10": 10_000, "digits": 297}
"""Number of test images of each data set."""


def finished(result: Result) -> list[Phase]:
    """List the phases whose epochs have all been recorded.

    Args:
        result: A run.

    Returns:
        Its finished phases, in order.
    """
    return [phase for phase in result.phases() if phase.finished]


def paired_difference(first: Result, second: Result, a: Array, b: Array) -> Array:
    """Subtract values of two runs, seed by seed.

    Args:
        first: A run.
        second: Another run.
        a: A value for each seed of `first`.
        b: A value for each seed of `second`.

    Returns:
        The differences a − b for the seeds that both runs have.
    """
    _, own, others = np.intersect1d(first.run.seeds, second.run.seeds, return_indices=True)
    return a[own] - b[others]


# FDR1 -----------------------------------------------------------------------------------------


def residual(phase: Phase) -> Array:
    """Compute L̄/R̄ − 1 at the end of a phase.

    Args:
        phase: A phase.

    Returns:
        A value for each seed.
    """
    return phase.last("left") / phase.last("right") - 1


def relaxation_times(phase: Phase) -> Array:
    """Compute the epochs after which |L̄/R̄ − 1| stays below 0.1 until the end of the phase.

    >>> import types
    >>> sides = {"left": np.array([[3.0], [1.2], [1.05], [1.0]]), "right": np.ones((4, 1))}
    >>> phase = types.SimpleNamespace(time=np.arange(1.0, 5.0), column=sides.get)
    >>> relaxation_times(phase)
    array([3.])

    Args:
        phase: A phase.

    Returns:
        A time for each seed; nan if the seed has not relaxed at the end.
    """
    near = np.abs(phase.column("left") / phase.column("right") - 1) < RELAXED
    return _settling_times(phase.time, near)


def _settling_times(time: Array, settled: NDArray[np.bool_]) -> Array:
    """Return the time from which each column of `settled` stays true; nan if it ends false."""
    staying = np.cumprod(settled[::-1], axis=0)[::-1].astype(bool)
    return np.where(staying[-1], time[np.argmax(staying, axis=0)], np.nan)


def geometric_mean(values: Array) -> tuple[float, float, float]:
    """Compute the geometric mean over seeds and its 95 % interval.

    >>> print(["%.2g" % value for value in geometric_mean(np.array([1.0, 10.0, 100.0]))])
    ['10', '0.033', '3e+03']

    Args:
        values: A positive value for each seed.

    Returns:
        The mean and the lower and upper end of the interval.
    """
    logs = mean_over_seeds(np.log(values))
    low, high = logs.interval
    return math.exp(logs.value), math.exp(low), math.exp(high)


def relaxation_power(phases: Sequence[Phase]) -> tuple[Array, Array] | None:
    """Fit relaxation times with c·η^p, for each seed.

    Learning rates at which some seed has not relaxed are left out.

    Args:
        phases: Phases at different learning rates.

    Returns:
        p and log c for each seed, or None with fewer than two learning rates.
    """
    times = {phase.lr: relaxation_times(phase) for phase in phases}
    relaxed = {lr: np.log(values) for lr, values in times.items() if not np.isnan(values).any()}
    if len(relaxed) < 2:
        return None
    power, log_scale = np.polyfit(np.log([*relaxed]), np.array([*relaxed.values()]), 1)
    return power, log_scale


# FDR2 -----------------------------------------------------------------------------------------


def landscape(result: Result) -> tuple[Array, Array]:
    """Collect O_FB of all finished phases.

    Args:
        result: A run that measures O_FB.

    Returns:
        Learning rates in increasing order, and O_FB of shape (learning rates, seeds).
    """
    phases = sorted(finished(result), key=lambda phase: phase.lr)
    return np.array([p.lr for p in phases]), np.array([p.last("landscape") for p in phases])


def departures(result: Result, largest: float) -> list[Estimate]:
    """Estimate the relative difference of O_FB/η to its value at the smallest η.

    Args:
        result: A run that measures O_FB.
        largest: The largest η to consider.

    Returns:
        An estimate for each η above the smallest and up to `largest`, in increasing order.
    """
    lrs, values = landscape(result)
    small = lrs <= largest * (1 + 1e-9)
    per_lr = values[small] / lrs[small, None]
    return [ratio_over_seeds(row, per_lr[0]).shifted(-1) for row in per_lr[1:]]


def landscape_change(result: Result) -> Estimate:
    """Estimate the relative change of O_FB/η from the largest η to the smallest.

    Args:
        result: A run that measures O_FB.

    Returns:
        The estimate; its value is nan with fewer than two finished phases.
    """
    lrs, values = landscape(result)
    if len(lrs) < 2:
        return Estimate(math.nan, math.nan)
    return ratio_over_seeds(values[0] / lrs[0], values[-1] / lrs[-1]).shifted(-1)


def halfway(phase: Phase, name: str) -> Array:
    """Find the value of one column in the middle of a phase.

    Half-running averages in the middle and at the end of a phase have no step in common.

    Args:
        phase: A phase.
        name: The column.

    Returns:
        The last value for each seed that was recorded up to the middle; nan without one.
    """
    values = phase.column(name)[phase.time <= phase.epochs / 2]
    there = ~np.isnan(values).all(1)
    return values[there][-1] if there.any() else np.full(values.shape[1], np.nan)


def later_change(phase: Phase, name: str) -> Estimate:
    """Estimate the relative change of one column from the middle of a phase to its end.

    Args:
        phase: A phase.
        name: The column, which contains half-running averages.

    Returns:
        The estimate; its value is nan if nothing was recorded up to the middle.
    """
    return ratio_over_seeds(phase.last(name), halfway(phase, name)).shifted(-1)


def steps_per_epoch(result: Result) -> int:
    """Compute the number of batches in an epoch.

    Args:
        result: A run with at least one row.

    Returns:
        The number.
    """
    last = result.rows[-1]
    return round(last["step"] / last["epoch"])


def reshuffled_product(momentum: float, batches: int) -> float:
    """Compute ⟨v·ξ⟩/Tr C in reshuffled epochs, for slow modes.

    v is the velocity before a step and ξ the noise of its batch. The noises of an epoch's M batches
    sum to zero, so that ⟨ξ_t·ξ_s⟩ = −Tr C/(M−1). v contains −Σ μ^(k−1) ξ_(t−k) for the earlier
    steps of the epoch. On average over the epoch this gives

        [1 − (1−μ^M)/(M(1−μ))] / ((1−μ)(M−1))

    for modes that are slower than an epoch, and less for faster modes. It is zero with independent
    batches.

    >>> print(f"{reshuffled_product(0.9, batches=500):.5f}")
    0.01964

    Args:
        momentum: μ.
        batches: Batches in an epoch, M.

    Returns:
        ⟨v·ξ⟩/Tr C.
    """
    memory = (1 - (1 - momentum**batches) / (batches * (1 - momentum))) / (1 - momentum)
    return memory / (batches - 1)


def reshuffling_offset(phase: Phase) -> float:
    """Compute −μ⟨v·ξ⟩, the largest change of the second term of O_FB by reshuffling.

    All modes are assumed to be slow, and Tr C is 2(1−μ)R̄/η to lowest order in η.

    Args:
        phase: A phase with reshuffled batches.

    Returns:
        The change, zero or negative.
    """
    momentum = phase.result.run.momentum
    trace = 2 * (1 - momentum) * float(phase.last("right").mean()) / phase.lr
    product = reshuffled_product(momentum, steps_per_epoch(phase.result))
    return -momentum * product * trace


# Schedules ------------------------------------------------------------------------------------


def accuracy(result: Result, arm: str, part: slice, name: str = "test_accuracy") -> Array:
    """Average the accuracy over a part of the epochs, at least one.

    Args:
        result: A run that measures accuracies.
        arm: An arm of the run.
        part: Start and end of the part, as fractions of the recorded epochs.
        name: The column to average.

    Returns:
        A value for each seed.
    """
    _, values = result.measured(name, arm)
    count = len(values)
    start = min(round((part.start or 0.0) * count), count - 1)
    stop = max(1, round((part.stop or 1.0) * count))
    return values[start:stop].mean(0) if count else np.array([])


def sampling_error(accuracy: float, data: str) -> float:
    """Compute √(p(1−p)/n), the standard error of an accuracy p on n test images.

    >>> round(sampling_error(0.5, "mnist"), 6)
    0.005

    Args:
        accuracy: p.
        data: Name of the data set, which has n test images.

    Returns:
        The standard error.
    """
    return math.sqrt(accuracy * (1 - accuracy) / TEST_IMAGES[data])


def arrival(result: Result, arm: str) -> Array:
    """Compute the first epoch from which the test accuracy stays at its final value.

    The final value p is the mean over the last twentieth of the epochs. The accuracy, averaged over
    the latest five epochs, is at its final value if they differ by at most two sampling errors,
    2√(p(1−p)/n) on n test images.

    Args:
        result: A run that measures accuracies.
        arm: An arm of the run.

    Returns:
        An epoch for each seed; nan if the accuracy is not at its final value at the end.
    """
    epoch, values = result.measured("test_accuracy", arm)
    final = accuracy(result, arm, END)
    sums = np.concatenate([np.zeros((1, len(final))), np.cumsum(values, axis=0)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - SMOOTHING, 0)
    smooth = (sums[ends] - sums[starts]) / (ends - starts)[:, None]
    width = np.array([2 * sampling_error(p, result.run.task.data) for p in final])
    return _settling_times(epoch, np.abs(smooth - final) <= width)


@dataclass(frozen=True, eq=False)
class Grid:
    """The adaptive schedule over X (rows) and Y (columns), averaged over seeds."""

    thresholds: tuple[float, ...]
    """The values of X, in increasing order."""
    decreases: tuple[float, ...]
    """The values of Y, in increasing order."""
    accuracy: Array
    """Final test accuracies."""
    arrival: Array
    """Epochs from which the accuracy stays at its final value."""


def grid(result: Result) -> Grid:
    """Compute final test accuracies and epochs of arrival for all X and Y.

    Args:
        result: A run whose adaptive arms are a grid over X and Y.

    Returns:
        The grid.
    """
    arms = {
        (s.threshold, s.decrease): arm
        for arm, s in result.run.arms.items()
        if isinstance(s, Adaptive)
    }
    xs, ys = (tuple(sorted({pair[k] for pair in arms})) for k in (0, 1))
    final = [[accuracy(result, arms[x, y], END).mean() for y in ys] for x in xs]
    epochs = [[arrival(result, arms[x, y]).mean() for y in ys] for x in xs]
    return Grid(xs, ys, np.array(final), np.array(epochs))
