"""What a cooldown gains on a quadratic, exactly, and what an average of the parameters tells of it.

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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from equilibrate.solvable.matrices import product_trace
from equilibrate.solvable.quadratic import Quadratic


def linear_cooldown(lr: float, steps: int) -> list[float]:
    """Return the learning rates of a linear cooldown: lr·(n−1)/n, …, lr/n, 0.

    Args:
        lr: The learning rate before the cooldown.
        steps: Number of steps n.

    Returns:
        The learning rate of each of the n steps.

    Example:
        >>> linear_cooldown(0.4, steps=4)
        [0.30000000000000004, 0.2, 0.1, 0.0]
    """
    return [lr * (steps - 1 - k) / steps for k in range(steps)]


def cooldown_gain(model: Quadratic, lrs: Sequence[float]) -> float:
    """Return by how much the mean loss falls if the learning rate follows a schedule from now on.

    The start is the stationary state at the learning rate of the model. The covariance of (θ, v)
    is propagated step by step, so the result is exact at any learning rate and momentum.

    Args:
        model: The quadratic loss, its noise and the settings of SGD.
        lrs: The learning rate of each step to come.

    Returns:
        ⟨f⟩ before the first step, less ⟨f⟩ after the last one.

    Example:
        >>> model = Quadratic(torch.tensor([1.0]), noise=torch.tensor([1.0]), lr=0.1)
        >>> print(f"{cooldown_gain(model, linear_cooldown(0.1, 400)) / model.excess_loss:.3f}")
        0.866
    """
    d = len(model.hessian)
    one = torch.eye(d).to(model.hessian)
    kept = 1 - model.dampening
    covariance = model.state_covariance
    for lr in lrs:
        # v′ = μv − (1−ν)(Hθ + ξ), θ′ = θ + ηv′
        velocity = torch.cat([-kept * model.hessian, model.momentum * one], dim=1)
        position = torch.cat([one, torch.zeros_like(one)], dim=1) + lr * velocity
        step = torch.cat([position, velocity])
        enters = torch.cat([lr * one, one]) * -kept
        covariance = step @ covariance @ step.T + enters @ model.noise @ enters.T
    return model.excess_loss - product_trace(model.hessian, covariance[:d, :d]) / 2


def lagged_excess(model: Quadratic, half_life: float, every: int = 1) -> float:
    r"""Return ½⟨(θ_t − m_t)·g_t⟩ for m the exponential mean of θ_{t−k}, θ_{t−2k}, … before t.

    With the transition T of (θ, v), their covariance S and b = 2^(−k/half-life) it is

        ½ Tr H[S − (1−b) T^k (1 − bT^k)⁻¹ S]_θθ

    For one mode without momentum, r = (1−ηh)^k, it is ½hΣ(1−r)/(1−br). With every = 1, times b, it
    is the same for a mean that includes θ_t.

    Args:
        model: The quadratic loss, its noise and the settings of SGD.
        half_life: Half-life of the mean, in steps.
        every: The parameters enter the mean every k-th step.

    Returns:
        The average in the stationary state.

    Example:
        >>> model = Quadratic(torch.tensor([1.0]), noise=torch.tensor([1.0]), lr=0.01)
        >>> print(f"{lagged_excess(model, half_life=86) / model.excess_loss:.3f}")
        0.557
    """
    d = len(model.hessian)
    b = 2 ** (-every / half_life)
    power = torch.linalg.matrix_power(model.transition, every)
    one = torch.eye(2 * d).to(power)
    lagged = (1 - b) * power @ torch.linalg.solve(one - b * power, model.state_covariance)
    return model.excess_loss - product_trace(model.hessian, lagged[:d, :d]) / 2


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
    """Return the exponential mean that tells best what a linear cooldown over n steps gains.

    For a mode with x = ηhn/(1−μ) the cooldown gains the share 1 − √(π/x)/2·erf(√x) of its excess
    loss. If the parameters enter the mean m every k-th step, the last time k steps ago, c times
    ½⟨(θ − m)·g⟩ is the share c(1−r)/(1−br) with r = exp(−xk/n) and b = 2^(−k/half-life). Both are
    x/3 for slow modes if b = 1 − 3ck/n. The factor c is the one with the smallest relative error
    over all modes.

    Args:
        steps: Number of steps n of the cooldown.
        every: Steps k between two updates of the mean.

    Returns:
        The match. For k ≪ n the half-life is 0.24 n, the factor 0.95 and the error 0.04.

    Raises:
        ValueError: If `every` is more than a quarter of `steps`.

    Example:
        >>> match = exponential_match(400, every=16)
        >>> print(f"{match.half_life:.0f} steps, {match.factor:.2f}, {match.error:.3f}")
        94 steps, 0.93, 0.063
    """
    if not 1 <= every <= steps / 4:
        raise ValueError(
            f"every must lie between 1 and a quarter of the {steps} steps of the cooldown, got "
            f"{every}: measure more often, or forecast a longer cooldown"
        )
    x = np.logspace(-2, 4, 301)
    r = np.exp(-x * every / steps)
    factors = np.linspace(0.85, 1, 151)[:, None]
    decays = 1 - 3 * factors * every / steps
    errors = np.abs(factors * (1 - r) / (1 - decays * r) / cooldown_share(x) - 1).max(1)
    best = errors.argmin()
    half_life = -every / math.log2(decays[best, 0])
    return Match(half_life, float(factors[best, 0]), float(errors[best]))


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
