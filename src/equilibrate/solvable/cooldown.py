"""What a cooldown gains on a quadratic, exactly, and what an average of the parameters tells of it."""

from __future__ import annotations

from collections.abc import Sequence

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
