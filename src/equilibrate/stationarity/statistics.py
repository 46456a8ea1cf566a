"""Statistics of a trace: how long a training run is in units of its own relaxation time.

A trace holds positions x of the parameters (or linear sketches of them) at the ends of epochs since
a restart. Where examples are reshuffled in each epoch, most of the noise of its steps cancels at
its end, so `assess` takes the squared path between the positions as the displacement that noise
alone would make. Every function takes arrays with leading axes, one entry for each of several
independent traces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST = 8
"""Intervals that a trace must have to be assessed."""
_STARTS = np.arange(11) / 16
"""Where a window may begin, as a fraction of the trace."""
_LAGS = (1 / 4, 5 / 12, 7 / 12, 3 / 4)
"""Lags of the mean-square displacement, as fractions of the window."""
_SHORT = 32
"""The autocovariance of a trace is taken at this fraction of its length."""


@dataclass(frozen=True, slots=True, eq=False)
class Assessment:
    """What a trace says about relaxation; arrays of the shape of the leading axes."""

    relaxations: Array
    """Length of the trace in units of the relaxation time of what is still correlated."""
    significance: Array
    """The restoring force divided by its standard error, as in a test for a unit root."""
    start: Array
    """Where the window begins, as a fraction of the trace."""
    diffusing: Array
    """Share of the noise that still moves the parameters away over long lags: the growth of the
    mean-square displacement in units of the squared path. 1 for free diffusion, more for a
    drift."""
    error: Array
    """Standard error of `diffusing`, from the spread of the positions."""


def squared_path(positions: Array) -> Array:
    """Return the sums of the squared distances between successive positions, from 0.

    It is the displacement that the noise between two positions would cause without a restoring
    force, without what cancels within each interval. That is most of it where examples are
    reshuffled and an interval is an epoch.

    Args:
        positions: Positions of shape (…, n, m).

    Returns:
        The sums, of shape (…, n).
    """
    steps = _square(np.diff(positions, axis=-2))
    return np.concatenate([np.zeros_like(steps[..., :1]), np.cumsum(steps, axis=-1)], axis=-1)


def assess(positions: Array) -> Assessment:
    r"""Return how far a trace has relaxed.

    Let y be the distance from the mean position, and V the squared path (`squared_path`). The
    autocovariance C(l) = ⟨y_t·y_{t+l}⟩ decays at the rate k = −C′(l)/C(l), which at a short lag l
    is the rate of the modes that are still correlated then. The rate
    k₀ = (V − |y_T|² + |y_0|²)/(2∫|y|²) is the least-squares estimate of a restoring force, and its
    error is √(Σ_i D_i S_i)/∫|y|², with the noise D_i and ∫y_i² = S_i along each direction.
    `relaxations` is the smaller rate times the length of the trace. Both are too large for short
    traces, by about three relaxation times, since the mean position is estimated too.

    The window leaves out the way from a distant start: it begins where the mean position of the
    rest is known best (the MSER criterion). Inside it the mean-square displacement grows by
    Σ_i w_i e^(−k_i l) V at lag l, the share of the noise that has not been pulled back yet.

    Args:
        positions: Positions of shape (…, n, m), in equal intervals, at least `LEAST` of them.

    Returns:
        The statistics of each trace.

    Raises:
        ValueError: If there are too few positions.
    """
    intervals = positions.shape[-2] - 1
    if intervals < LEAST:
        raise ValueError(f"positions must have at least {LEAST} intervals, got {intervals}")
    lead = positions.shape[:-2]
    x = positions.reshape(-1, intervals + 1, positions.shape[-1])
    x = x - x[:, -1:]  # the sums below are then differences of small numbers
    v = squared_path(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {**_force(x, v[:, -1]), **_window(x, v)}
    return Assessment(**{name: value.reshape(lead) for name, value in found.items()})


def _force(x: Array, total: Array) -> dict[str, Array]:
    """Return the statistics of the restoring force over a whole trace."""
    n = x.shape[1] - 1
    y = x - x.mean(1, keepdims=True)
    square = _square(y)
    lag = max(1, n // _SHORT)
    steps = np.diff(x, axis=1)
    pull = -_dot(y[:, : n - lag], steps[:, lag:])
    kept = _dot(y[:, : n - lag], y[:, lag:n])
    relaxations = np.where(kept > 0, n * pull / np.where(kept > 0, kept, 1.0), np.inf)
    force = (total - square[:, -1] + square[:, 0]) / 2
    relaxations = np.minimum(relaxations, force / square.mean(1))
    late = steps[:, n // 2 :]
    noise = np.matmul(late.transpose(0, 2, 1), late)
    noise *= (total / np.trace(noise, axis1=1, axis2=2))[:, None, None]
    moved = np.matmul(y.transpose(0, 2, 1), y) / (n + 1)
    error = np.sqrt((noise * moved).sum((1, 2)))
    return {"relaxations": relaxations, "significance": force / error}


def _window(x: Array, v: Array) -> dict[str, Array]:
    """Return the statistics of the window of each trace, which is chosen first."""
    n = x.shape[1] - 1
    first = np.unique((_STARTS * n).astype(int))
    counts = n + 1 - first
    sums = np.flip(np.cumsum(np.flip(x, 1), 1), 1)[:, first]
    squares = np.flip(np.cumsum(np.flip(_square(x), 1), 1), 1)[:, first]
    variances = squares / counts - _square(sums) / counts**2
    chosen = (variances / (counts - 1)).argmin(1)
    rows = np.arange(len(x))
    begin = first[chosen]
    total = v[:, -1] - v[rows, begin]
    spread = variances[rows, chosen] / total
    growth, error = np.empty(len(x)), np.empty(len(x))
    for index in np.unique(chosen):
        mine = chosen == index
        growth[mine], error[mine] = _growth(x[mine, first[index] :], total[mine])
    return {
        "start": begin / n,
        "diffusing": growth,
        "error": spread * error,
    }


def _growth(w: Array, total: Array) -> tuple[Array, Array]:
    """Return the slope of the mean-square displacement, and 1/√(directions that are explored)."""
    n = w.shape[1] - 1
    lags = np.unique(np.round(np.array(_LAGS) * n).astype(int))
    found = np.stack([_square(w[:, lag:] - w[:, : n + 1 - lag]).mean(1) for lag in lags], 1)
    weights = (lags - lags.mean()) / ((lags - lags.mean()) ** 2).sum()
    y = w - w.mean(1, keepdims=True)
    moved = np.matmul(y.transpose(0, 2, 1), y)
    directions = np.trace(moved, axis1=1, axis2=2) ** 2 / (moved**2).sum((1, 2))
    return found @ weights * n / total, 1 / np.sqrt(directions)


def _square(x: Any) -> Array:
    return np.einsum("...i,...i->...", x, x)


def _dot(a: Array, b: Array) -> Array:
    return np.einsum("rti,rti->r", a, b)
