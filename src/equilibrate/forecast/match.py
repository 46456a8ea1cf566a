"""Which mean of the parameters tells what a cooldown would gain.

Along one mode of curvature h, and for small learning rates, a linear cooldown from η to zero over n
steps takes the stationary variance of the parameters from Σ to

    Σ ∫₀¹ exp(−xu²) du = Σ · √(π/x)/2 · erf(√x),        x = ηhn/(1−μ)

while ½⟨(θ_t − θ_{t−k})·g_t⟩ = ½hΣ(1 − exp(−xk/n)). So with k = nu², that is with the mean

    θ̄_t = Σ_{k≤n} θ_{t−k} / (2√(nk))

½⟨(θ_t − θ̄_t)·g_t⟩ is just what the cooldown gains, whatever the curvatures and the noise.
`exponential_match` finds the exponential mean that comes closest to this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True)
class Match:
    """The exponential mean whose reading is closest to the gain of a linear cooldown."""

    half_life: float
    """Half-life of the mean, in steps."""
    factor: float
    """What ½⟨(θ − m)·g⟩ is multiplied by."""
    error: float
    """Largest relative error over all modes."""


@lru_cache
def exponential_match(steps: int, every: int = 1) -> Match:
    r"""Return the exponential mean that tells best what a linear cooldown over n steps gains.

    For a mode with x = ηhn/(1−μ) the cooldown gains the share 1 − √(π/x)/2·erf(√x) of its excess
    loss. The parameters enter the mean m at one random step in each block of k, so that the gaps
    between two such steps are k + p − q with positions p, q from 0 to k − 1, and m decays by
    b = 2^(−gap/half-life) over each. With r = exp(−x·gap/n), the correlation w of m with θ right
    after a step at position p obeys w_p = ⟨b r w_q + 1 − b⟩_q, and c times ½⟨(θ − m)·g⟩ is the
    share c(1 − ⟨r w_q⟩_pq). For slow modes both shares are proportional to x, and equal if c times
    the mean age of m is n/3, which sets the half-life. The factor c is the one with the smallest
    relative error over all modes.

    Args:
        steps: Number of steps n of the cooldown.
        every: Number of steps k in a block.

    Returns:
        The match. For k ≪ n the half-life is 0.24 n, the factor 0.95 and the error 0.04.

    Raises:
        ValueError: If `every` is more than a quarter of `steps`.

    Example:
        >>> match = exponential_match(400, every=16)
        >>> print(f"{match.half_life:.0f} steps, {match.factor:.2f}, {match.error:.3f}")
        94 steps, 0.94, 0.058
    """
    if not 1 <= every <= steps / 4:
        raise ValueError(
            f"every must lie between 1 and a quarter of the {steps} steps of the cooldown, got "
            f"{every}: measure more often, or forecast a longer cooldown"
        )
    x = np.logspace(-2, 4, 61)
    wanted, best = cooldown_share(x), Match(math.nan, math.nan, math.inf)
    for factor in np.linspace(0.85, 1, 31).tolist():
        half_life = _half_life(steps / (3 * factor), every)
        error = np.abs(factor * lagged_share(x / steps, half_life, every) / wanted - 1).max()
        if error < best.error:
            best = Match(half_life, factor, float(error))
    return best


def lagged_share(rates: np.ndarray, half_life: float, every: int = 1) -> np.ndarray:
    """Return ½⟨(θ − m)·g⟩ in units of the excess loss, for modes that relax at some rates a step.

    The mean m takes the parameters in at one random step in each block; see `exponential_match`.

    Args:
        rates: Relaxation rate ηh/(1−μ) of each mode.
        half_life: Half-life of the mean, in steps.
        every: Number of steps in a block.

    Returns:
        The share of each mode.

    Example:
        >>> lagged_share(np.array([0.001, 0.01, 0.1]), half_life=97.0, every=16).round(3).tolist()
        [0.129, 0.611, 0.963]
    """
    gaps = _gaps(every)
    decay = 2 ** (-gaps / half_life)
    kept = np.exp(-rates[:, None, None] * gaps)
    taken = np.broadcast_to((1 - decay).mean(1)[:, None], (len(rates), every, 1))
    after = np.linalg.solve(np.eye(every) - decay * kept / every, taken)[..., 0]
    return 1 - (kept * after[:, None, :]).mean((1, 2))


def _gaps(every: int) -> np.ndarray:
    """Return the steps between samples at positions q and p of successive blocks, as [p, q]."""
    positions = np.arange(every)
    return every + positions[:, None] - positions


def _half_life(age: float, every: int) -> float:
    """Return the half-life of a mean whose samples are of a given age on average."""
    gaps = _gaps(every)
    low, high = 0.01 * age, 10 * age
    for _ in range(60):
        middle = (low + high) / 2
        decay = 2 ** (-gaps / middle)
        # Right after a sample the age is ⟨b(gap + age before)⟩, and at the next one a gap more.
        ages = np.linalg.solve(np.eye(every) - decay / every, (decay * gaps).mean(1))
        low, high = (middle, high) if (gaps + ages).mean() < age else (low, middle)
    return low


def cooldown_share(x: np.ndarray) -> np.ndarray:
    """Return 1 − √(π/x)/2·erf(√x), the share of a mode's excess loss that a linear cooldown gains.

    Args:
        x: ηhn/(1−μ) of each mode, positive.

    Returns:
        The share: x/3 for small x, 1 − √(π/x)/2 for large.

    Example:
        >>> cooldown_share(np.array([0.003, 3.0, 3000.0])).round(3).tolist()
        [0.001, 0.496, 0.984]
    """
    root = np.sqrt(x)
    return 1 - math.sqrt(math.pi) / 2 * np.vectorize(math.erf)(root) / root
