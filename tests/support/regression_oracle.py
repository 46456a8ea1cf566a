"""Exact averages of linear regression on a few examples, by enumeration of all mini-batches."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch


class Exact(NamedTuple):
    """Both sides of FDR2, (1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩ and (η/2)⟨v′ᵀHv′⟩, and ⟨Tr C̃⟩."""

    left: float
    right: float
    noise_trace: float


def exact_averages(inputs, targets, lr, momentum, dampening, batch_size) -> Exact:
    """Stationary averages of linear regression on a few examples.

    Every mini-batch B maps z = (θ−θ*, v) to A_B z + c_B, and the stationary covariance solves the
    linear equation S = ⟦A_B S A_Bᵀ + c_B c_Bᵀ⟧, where ⟦…⟧ is the mean over all mini-batches.
    """
    d, n = inputs.shape[1], len(inputs)
    hessian = inputs.T @ inputs / n
    optimum = torch.linalg.solve(hessian, inputs.T @ targets[:, 0] / n)
    one = torch.eye(d).double()
    carry = torch.zeros((2 * d) ** 2, (2 * d) ** 2).double()
    kick = torch.zeros(2 * d, 2 * d).double()
    every = list(itertools.combinations(range(n), batch_size))
    parts = []
    for chosen in every:
        x, y = inputs[list(chosen)], targets[list(chosen), 0]
        h, g = x.T @ x / batch_size, x.T @ (x @ optimum - y) / batch_size
        parts.append((h, g))
        velocity = torch.cat([-(1 - dampening) * h, momentum * one], dim=1)
        position = torch.cat([one, torch.zeros_like(one)], dim=1) + lr * velocity
        a = torch.cat([position, velocity])
        c = torch.cat([-lr * (1 - dampening) * g, -(1 - dampening) * g])
        carry += torch.kron(a, a) / len(every)
        kick += torch.outer(c, c) / len(every)
    s = torch.linalg.solve(torch.eye(len(carry)).double() - carry, kick.reshape(-1))
    s = s.view(2 * d, 2 * d)
    left = (1 - dampening) * (hessian @ s[:d, :d] @ hessian).trace()
    left -= momentum * (hessian @ s[:d, d:]).trace()
    noise = sum((h @ s[:d, :d] @ h).trace() + g @ g for h, g in parts) / len(every)
    return Exact(left.item(), (lr / 2 * (hessian @ s[d:, d:]).trace()).item(), float(noise))


def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean() / 2
