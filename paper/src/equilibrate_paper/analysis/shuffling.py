"""How much reshuffling lowers O_FB, and the one curvature that would explain it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from equilibrate.estimates import Estimate, student_quantile
from equilibrate.solvable import epoch_end_factor
from equilibrate_paper.analysis import measures
from equilibrate_paper.analysis.results import Array, Result
from equilibrate_paper.analysis.seeds import CONFIDENCE, mean_over_seeds

_GRID = np.geomspace(1e-3, 1.0, 2001)
"""Curvatures at which χ² is computed, times the largest η. A mode with ηh > 1 overshoots."""


@dataclass(frozen=True)
class CurvatureFit:
    """A curvature fitted to ratios of O_FB with reshuffled and with independent batches."""

    curvature: float
    """The curvature h with the smallest χ²."""
    low: float
    """Lower end of its 95 % interval; 0 if the smallest curvature considered is in it."""
    high: float
    """Upper end of its 95 % interval; inf if the largest curvature considered is in it."""
    chi_square: float
    """The smallest χ²."""
    dof: int
    """Degrees of freedom of χ², one less than there are ratios."""
    batches: int
    """Batches in an epoch, M."""

    def factor(self, lrs: Array) -> Array:
        """Compute the ratio that the fitted curvature predicts.

        Args:
            lrs: Learning rates.

        Returns:
            The `epoch_end_factor` at each of them.
        """
        return _factor(self.curvature * lrs, self.batches)


def ratios(shuffled: Result, independent: Result) -> dict[float, Estimate]:
    """Estimate O_FB with reshuffled batches divided by that with independent batches.

    Args:
        shuffled: The run with reshuffled batches.
        independent: The run with independent batches.

    Returns:
        An estimate for each η that both runs have finished, in increasing order of η.
    """
    first, second = (
        {float(lr): mean_over_seeds(values) for lr, values in zip(*found, strict=True)}
        for found in (measures.landscape(result) for result in (shuffled, independent))
    )
    return {lr: first[lr].over(second[lr]) for lr in first if lr in second}


def fit_runs(shuffled: Result, independent: Result) -> CurvatureFit | None:
    """Fit one curvature to the ratios of O_FB of two runs.

    Args:
        shuffled: The run with reshuffled batches.
        independent: The run with independent batches.

    Returns:
        The fit. None with momentum, for which the factor is not known, or if `fit_curvature` finds
        none.
    """
    if shuffled.run.momentum or not shuffled.rows:
        return None
    return fit_curvature(ratios(shuffled, independent), measures.steps_per_epoch(shuffled))


def fit_curvature(ratios: Mapping[float, Estimate], batches: int) -> CurvatureFit | None:
    """Fit the curvature h of a single mode to ratios of O_FB at several learning rates.

    Without momentum, reshuffling multiplies the variance of a mode at the ends of epochs, and so
    its part of O_FB, by `solvable.epoch_end_factor`, about 1 − tanh(x/2)/(x/2) with x = Mηh. h is
    the curvature that minimizes

        χ²(h) = Σ ((ratio − factor) / standard error)²

    where ratios at different η are assumed to be independent. Curvatures from 0.001/η to 1/η are
    considered, with the largest η. The 95 % interval consists of all h
    with χ²(h) ≤ χ²_min + t². t is Student's quantile with the fewest degrees of freedom of a ratio,
    so that the interval is a little too wide rather than too narrow.

    >>> lrs = np.array([0.003, 0.01, 0.05])
    >>> exact = epoch_end_factor(torch.from_numpy(6 * lrs), 600).tolist()
    >>> ratios = {lr: Estimate(r, 0.01, dof=15) for lr, r in zip(lrs, exact)}
    >>> print(f"{fit_curvature(ratios, batches=600).curvature:.4f}")
    6.0000

    Args:
        ratios: Estimates of the ratio by learning rate.
        batches: Batches in an epoch, M.

    Returns:
        The fit. None with fewer than two ratios, without standard errors, or if χ² is smallest at
        the smallest or the largest curvature considered.
    """
    lrs = sorted(ratios)
    values, errors = (
        np.array([getattr(ratios[lr], name) for lr in lrs]) for name in ("value", "stderr")
    )
    if len(lrs) < 2 or not (np.isfinite(values) & (errors > 0)).all():
        return None

    def deviation(factors: Array) -> Array:
        return (((values - factors) / errors) ** 2).sum(-1)

    chi_square = deviation(_factors(tuple(lrs), batches))
    best = int(chi_square.argmin())
    if best in (0, len(_GRID) - 1):
        return None
    # Near its minimum χ² is a parabola in log h: three points on the grid determine it.
    log_h = np.log(_GRID / lrs[-1])
    before, least, after = chi_square[best - 1 : best + 2]
    shift = (before - after) / (2 * (before - 2 * least + after))
    center = float(log_h[best] + shift * (log_h[1] - log_h[0]))
    minimum = float(deviation(_factor(math.exp(center) * np.array(lrs), batches)))
    # So √(χ² − χ²_min) is nearly linear on each side, and is interpolated.
    place = int(np.searchsorted(log_h, center))
    log_h = np.insert(log_h, place, center)
    distance = np.insert(np.sqrt(np.maximum(chi_square - minimum, 0)), place, 0.0)
    reach = student_quantile(CONFIDENCE, min(estimate.dof for estimate in ratios.values()))
    high = _outermost(log_h, distance, reach)
    low = -_outermost(-log_h[::-1], distance[::-1], reach)
    return CurvatureFit(
        math.exp(center), math.exp(low), math.exp(high), minimum, len(lrs) - 1, batches
    )


def _outermost(places: Array, distance: Array, reach: float) -> float:
    """Return the last place at which the distance crosses `reach`; inf if it ends below."""
    inside = int(np.flatnonzero(distance <= reach)[-1])
    if inside == len(places) - 1:
        return math.inf
    between = slice(inside, inside + 2)
    return float(np.interp(reach, distance[between], places[between]))


@lru_cache(maxsize=8)
def _factors(lrs: tuple[float, ...], batches: int) -> Array:
    """Return the factors at all curvatures considered, of shape (curvatures, learning rates)."""
    curvatures = _GRID / lrs[-1]
    return np.stack([_factor(lr * curvatures, batches) for lr in lrs], axis=-1)


def _factor(rates: Array, batches: int) -> Array:
    return epoch_end_factor(torch.from_numpy(rates), batches).numpy()
