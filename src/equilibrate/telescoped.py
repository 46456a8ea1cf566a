r"""Error bars for means whose sum telescopes, such as the residual of FDR1.

The difference of the two sides of FDR1 over a window of n steps is the change of a potential,
Σ(L − R) = Φ_0 − Φ_n, which up to boundary terms is |θ|² (`solvable.Quadratic.residual_deviation`).
In the stationary state its mean is zero and its variance is 2 Var Φ (1 − ρ_Φ(n)): the error of the
mean difference falls as 1/n, and not as 1/√n.

One window shows one change over n steps. But it also shows the changes between all other times s, t
that are at least half a window apart. If the slowest mode relaxes within a small part of the
window, all of them are changes between two independent values of Φ, as the one over the whole
window is. Hence

- the mean of their squares is an unbiased estimate of 2 Var Φ. Unlike a sample variance it does not
  need the mean of Φ, which a few relaxation times do not tell, nor the correlation time;
- the change over the whole window is as likely as any other to be among the largest 5 %, so that
  their 95 % quantile is the margin of an interval that contains zero in 95 % of all windows. This
  is a permutation argument, so it holds for any distribution of Φ, such as χ² in one dimension.

Times are taken more densely towards the ends of the window (`times`). A value at an end has
correlated neighbours on one side only; with equal spacing the change over the whole window would
count for less than one in the middle, and intervals would be too narrow if Φ is slow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

INTERVALS = 64
"""Intervals between the times at which the potential is compared."""
FEWEST = 8
"""Intervals below which there is no error bar: the largest of too few changes says too little."""
_POWER = 1.5
"""Makes times denser towards the ends. Coverage changes by less than 1 % from 1.25 to 2."""
_CONFIDENCE = 0.95
"""Probability with which the change over the window lies within the margin."""
_TOGETHER = 512
"""Series that are worked out together, which bounds the memory."""


def times(intervals: int = INTERVALS) -> Floats:
    """Return the times at which a potential is compared with itself, as fractions of the window.

    Args:
        intervals: Number of intervals between them.

    Returns:
        Increasing numbers from 0 to 1, one more than there are intervals.

    Example:
        >>> times(4).round(2).tolist()
        [0.0, 0.18, 0.5, 0.82, 1.0]
    """
    half = np.linspace(0, 1, intervals + 1)
    early = (2 * half) ** _POWER / 2
    late = 1 - (2 * (1 - half)) ** _POWER / 2
    return np.where(half < 0.5, early, late)


def spread(potential: Floats, positions: Floats) -> tuple[Floats, Floats]:
    """Estimate how much a stationary potential changes over a window.

    The result does not depend on the mean of the potential, and is proportional to its size. A
    potential that drifts is taken as if it fluctuated: for one that changes at a constant rate the
    standard deviation is 0.73 and the margin 0.95 of the change over the window, so that an
    interval around that change still excludes zero.

    Args:
        potential: Values of Φ at increasing times, of shape (times,) or (times, series).
        positions: When each was measured, in any unit. Of several values at the same time only the
            first counts.

    Returns:
        The standard deviation √(2 Var Φ) of the change over the window, and the margin within which
        it lies in 95 % of all windows, for each series. Both are nan if there are fewer than eight
        intervals, or a value is not finite.

    Raises:
        ValueError: If `potential` and `positions` differ in length.

    Example:
        >>> phi = np.random.default_rng(0).normal(size=65)
        >>> deviation, margin = spread(phi, np.arange(65.0))
        >>> print(f"{deviation:.2f} ≈ √2, {margin:.2f} ≈ 1.96 √2")
        1.33 ≈ √2, 2.58 ≈ 1.96 √2
    """
    if len(potential) != len(positions):
        raise ValueError(
            "potential and positions must have the same length, got "
            f"{len(potential)} and {len(positions)}"
        )
    first = np.flatnonzero(np.diff(positions, prepend=-np.inf) > 0)
    if len(first) <= FEWEST:
        return np.full(potential.shape[1:], np.nan), np.full(potential.shape[1:], np.nan)
    earlier, later = _distant(positions[first])
    values = potential[first].reshape(len(first), -1)
    found = [
        _size(values[:, k : k + _TOGETHER], earlier, later)
        for k in range(0, values.shape[1], _TOGETHER)
    ]
    deviation, margin = np.concatenate(found, axis=1)
    return deviation.reshape(potential.shape[1:]), margin.reshape(potential.shape[1:])


def _distant(positions: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return all pairs of times that are at least half a window apart."""
    earlier, later = np.triu_indices(len(positions), 1)
    apart = positions[later] - positions[earlier]
    distant = apart >= (positions[-1] - positions[0]) / 2
    return earlier[distant], later[distant]


def _size(values: Floats, earlier: NDArray[np.intp], later: NDArray[np.intp]) -> Floats:
    """Return the root mean square and the quantile of the changes between pairs of times."""
    with np.errstate(invalid="ignore", over="ignore"):  # a gradient that was not finite
        changes = np.abs(values[later] - values[earlier])
        deviation = np.sqrt(np.mean(changes**2, axis=0))
    finite = np.isfinite(deviation)
    margin = np.full(len(deviation), np.nan)
    margin[finite] = np.quantile(changes[:, finite], _CONFIDENCE, axis=0)
    return np.stack([np.where(finite, deviation, np.nan), margin])
