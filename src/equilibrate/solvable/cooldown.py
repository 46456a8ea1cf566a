"""What a cooldown of a quadratic gains, exactly, and what an average of parameters tells of it."""

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
    r"""Return ½⟨(θ_t − m_t)·g_t⟩ for an exponential mean m of the parameters before t.

    The parameters enter the mean at one random step in each block of k, as in a `Forecaster`, and
    it decays by b = 2^(−gap/half-life) between them. With the transition T of (θ, v) and their
    covariance S, the covariance W_p of (θ, v) and m right after a step at position p of its block
    obeys W_p = ⟨b T^gap W_q + (1−b) S⟩_q with gap = k + p − q, and the result is

        ½ Tr H[S − ⟨T^gap W_q⟩_pq]_θθ

    For one mode without momentum and k = 1, r = 1−ηh, it is ½hΣ(1−r)/(1−br).

    Args:
        model: The quadratic loss, its noise and the settings of SGD.
        half_life: Half-life of the mean, in steps.
        every: The parameters enter the mean at one in this many steps.

    Returns:
        The average in the stationary state.

    Example:
        >>> model = Quadratic(torch.tensor([1.0]), noise=torch.tensor([1.0]), lr=0.01)
        >>> print(f"{lagged_excess(model, half_life=86) / model.excess_loss:.3f}")
        0.557
    """
    d, positions = len(model.hessian), torch.arange(every)
    gaps = every + positions[:, None] - positions  # from position q to position p of the next block
    powers = [torch.linalg.matrix_power(model.transition, gap) for gap in range(2 * every)]
    kept = torch.stack(powers)[gaps]
    decay = (2.0 ** (-gaps.double() / half_life)).to(kept)[..., None, None]
    taken = (1 - decay).mean(1) * model.state_covariance
    after = torch.zeros_like(taken)
    for _ in range(round(40 * half_life / every) + 2):
        after = (decay * kept @ after).mean(1) + taken
    lagged = (kept @ after).mean((0, 1))
    return model.excess_loss - product_trace(model.hessian, lagged[:d, :d]) / 2
