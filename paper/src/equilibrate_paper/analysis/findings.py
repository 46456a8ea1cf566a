"""What is measured for each claim: estimates over seeds, made from the results of its runs.

A claim may be about several learning rates or arms. Then there is an estimate for each, and all of
them have to satisfy the claim's bound. No estimate means that the runs are too short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from equilibrate.estimates import Estimate
from equilibrate_paper.analysis import measures
from equilibrate_paper.analysis.measures import END
from equilibrate_paper.analysis.results import Array, Phase, Result
from equilibrate_paper.analysis.seeds import CONFIDENCE, mean_over_seeds, ratio_over_seeds

Quantity = Callable[[Phase], Array]
"""Maps a phase to one value for each seed."""
Finding = Callable[..., Sequence[Estimate]]
"""Maps the results of a claim's runs to estimates."""
Arm = tuple[int, str]
"""Index of a run among those of a claim, and an arm of it."""

COMPARISONS = 6
"""Comparisons of precisions: one precision for the MLP and two for the CNN, in two quantities."""


def residuals(result: Result) -> list[Estimate]:
    """Estimate L̄/R̄ − 1 at the end of each phase.

    Args:
        result: A run with phases of constant learning rate.

    Returns:
        An estimate for each finished phase.
    """
    return [mean_over_seeds(measures.residual(phase)) for phase in measures.finished(result)]


def relaxation_power(result: Result) -> list[Estimate]:
    """Estimate the slope of log(relaxation time) against log η, fitted for each seed.

    Args:
        result: A run with phases of constant learning rate.

    Returns:
        One estimate, or none with fewer than two relaxed phases.
    """
    fit = measures.relaxation_power(measures.finished(result))
    return [] if fit is None else [mean_over_seeds(fit[0])]


def remaining_landscape(result: Result) -> list[Estimate]:
    """Estimate O_FB at the smallest learning rate divided by that at the largest.

    Args:
        result: A run that measures O_FB.

    Returns:
        One estimate, or none with fewer than two finished phases.
    """
    lrs, values = measures.landscape(result)
    return [ratio_over_seeds(values[0], values[-1])] if len(lrs) > 1 else []


def remaining_from_maximum(result: Result) -> list[Estimate]:
    """Estimate O_FB at the smallest learning rate divided by its maximum over learning rates.

    The maximum is at the learning rate with the largest mean over seeds. It is chosen from the same
    noisy values, so the ratio is a little too small.

    Args:
        result: A run that measures O_FB.

    Returns:
        One estimate, or none with fewer than two finished phases.
    """
    lrs, values = measures.landscape(result)
    if len(lrs) < 2:
        return []
    highest = max(range(len(lrs)), key=lambda i: float(values[i].mean()))
    return [ratio_over_seeds(values[0], values[highest])]


def departures_below(largest: float) -> Finding:
    """Measure how far O_FB/η departs from its value at the smallest η.

    Args:
        largest: The largest η to consider.

    Returns:
        A function that maps a result to an estimate for each further η up to `largest`.
    """
    return lambda result: measures.departures(result, largest)


def departure_at(lr: float) -> Finding:
    """Measure how far O_FB/η departs at one η from its value at the smallest, as a size.

    Args:
        lr: The learning rate η.

    Returns:
        A function that maps a result to one estimate, or none if η is not finished.
    """

    def measure(result: Result) -> list[Estimate]:
        return [replace(e, value=abs(e.value)) for e in measures.departures(result, lr)[-1:]]

    return measure


def shuffling_effect(shuffled: Result, independent: Result) -> list[Estimate]:
    """Estimate O_FB/η with reshuffled batches over that with independent batches, minus one.

    Args:
        shuffled: The run with reshuffled batches.
        independent: The run with independent batches.

    Returns:
        One estimate at the three smallest η in common, or none with fewer than three.
    """
    both = [measures.landscape(result) for result in (shuffled, independent)]
    common = np.intersect1d(both[0][0], both[1][0])[:3]
    if len(common) < 3:
        return []
    first, second = (
        mean_over_seeds((values[np.isin(lrs, common)] / common[:, None]).mean(0))
        for lrs, values in both
    )
    return [first.over(second).shifted(-1)]


def shuffling_effect_between(low: float, high: float) -> Finding:
    """Measure O_FB with reshuffled batches over that with independent batches, minus one.

    Args:
        low: The smallest η to consider.
        high: The largest η to consider.

    Returns:
        A function that maps the results with reshuffled and with independent batches to one
        estimate, of the mean of O_FB over these η, or to none if not all of them are finished.
    """

    def measure(shuffled: Result, independent: Result) -> list[Estimate]:
        means = []
        for result in (shuffled, independent):
            lrs, values = measures.landscape(result)
            inside = (lrs >= low * (1 - 1e-9)) & (lrs <= high * (1 + 1e-9))
            if not inside.any() or lrs.min() > low * (1 + 1e-9):  # the sequence is not that far
                return []
            means.append(mean_over_seeds(values[inside].mean(0)))
        first, second = means
        return [first.over(second).shifted(-1)]

    return measure


def accuracy_difference(first: Arm, second: Arm, part: slice) -> Finding:
    """Measure the test accuracy of one arm minus that of another, paired by seed.

    Args:
        first: The first arm.
        second: The arm to subtract.
        part: Fraction of the epochs over which accuracies are averaged.

    Returns:
        A function that maps results to one estimate.
    """

    def measure(*results: Result) -> list[Estimate]:
        pair = results[first[0]], results[second[0]]
        a = measures.accuracy(pair[0], first[1], part)
        b = measures.accuracy(pair[1], second[1], part)
        return [mean_over_seeds(measures.paired_difference(*pair, a, b))]

    return measure


def final_accuracy(arm: Arm) -> Callable[..., float]:
    """Measure the final test accuracy of an arm.

    Args:
        arm: The arm.

    Returns:
        A function that maps results to the mean over seeds.
    """
    return lambda *results: float(measures.accuracy(results[arm[0]], arm[1], END).mean())


def grid_spread(grid: Result, schedules: Result) -> list[Estimate]:
    """Estimate the best final accuracy of the grid minus the worst.

    The grid has one seed. The error is that of a difference of two single runs, √2 t s, with the
    standard deviation s over the seeds of the adaptive schedule.

    Args:
        grid: The run over all X and Y.
        schedules: The run with several seeds of the adaptive schedule.

    Returns:
        One estimate.
    """
    found = measures.grid(grid).accuracy
    seeds = mean_over_seeds(measures.accuracy(schedules, "adaptive", END))
    # The interval of a mean over n seeds is t s/√n.
    error = seeds.scaled(math.sqrt(2 * len(schedules.run.seeds)))
    return [replace(error, value=float(found.max() - found.min()))]


def grid_accuracy(grid: Result, schedules: Result) -> float:
    """Average the final accuracy over the grid.

    Args:
        grid: The run over all X and Y.
        schedules: Not used; the claim about the grid has two runs.

    Returns:
        The mean.
    """
    return float(measures.grid(grid).accuracy.mean())


def precision_residuals(single: Result, *others: Result) -> list[Estimate]:
    """Estimate the difference of L̄/R̄ − 1 to single precision, for each further precision.

    Args:
        single: The run in single precision.
        *others: The runs in other precisions.

    Returns:
        An estimate for each further precision, or none if a run is not finished.
    """
    return _compared(measures.residual, single, *others)


def precision_landscapes(single: Result, *others: Result) -> list[Estimate]:
    """Estimate the relative difference of O_FB to single precision, for each further precision.

    Args:
        single: The run in single precision.
        *others: The runs in other precisions.

    Returns:
        An estimate for each further precision, or none if a run is not finished.
    """
    phases = measures.finished(single)
    if not phases:
        return []
    unit = float(phases[0].last("landscape").mean())
    return _compared(lambda phase: phase.last("landscape") / unit, single, *others)


def _compared(quantity: Quantity, single: Result, *others: Result) -> list[Estimate]:
    phases = [measures.finished(result) for result in (single, *others)]
    if not all(phases):
        return []
    first, *further = (each[0] for each in phases)
    return [precision_difference(first, phase, quantity) for phase in further]


def precision_difference(single: Phase, other: Phase, quantity: Quantity) -> Estimate:
    """Estimate the difference of a quantity to single precision, paired by seed.

    All comparisons of precisions share one error probability, by Bonferroni's correction.

    Args:
        single: A phase in single precision.
        other: The same phase in another precision.
        quantity: What to compare.

    Returns:
        The estimate.
    """
    pair = other.result, single.result
    differences = measures.paired_difference(*pair, quantity(other), quantity(single))
    return mean_over_seeds(differences, 1 - (1 - CONFIDENCE) / COMPARISONS)
