"""Update rules on flat parameters: the direction v′ of a step θ′ = θ + ηv′, from the gradient.

What a rule remembers lives in tensors that are written in place and never replaced, as a CUDA
graph wants it; any leading axes (replicas) are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibrate import observables
from equilibrate.observables import Observable, Snapshot

Memory = Mapping[str, Tensor]


@dataclass(frozen=True)
class SGD:
    """v′ = μv − (1−ν)g, with v = 0 before the first step; its relation is FDR1′."""

    momentum: float = 0.0
    dampening: float = 0.0
    sides: tuple[Observable, Observable] = (observables.fdr1_left, observables.fdr1_right)

    def memory(self, parameters: Tensor) -> dict[str, Tensor]:
        """What the rule remembers from step to step, before the first."""
        return {"velocity": torch.zeros_like(parameters)}

    def direction(self, gradient: Tensor, memory: Memory) -> Tensor:
        """v′, with the memory brought forward."""
        velocity = memory["velocity"]
        if not self.momentum:
            return torch.mul(gradient, self.dampening - 1, out=velocity)
        return velocity.mul_(self.momentum).sub_(gradient, alpha=1 - self.dampening)

    def snapshot(self, parameters: Tensor, gradient: Tensor, after: Tensor, lr: Tensor) -> Snapshot:
        """What the observables are read from; `after` is v′."""
        return Snapshot(parameters, gradient, after, lr, self.momentum, self.dampening)


@dataclass(frozen=True)
class Adam:
    """v′ = −m̂/(√ŝ + ε) with the usual defaults; its relation is the step form.

    m and s are running means of g and g², m̂ and ŝ the same freed of their bias towards zero;
    AMSGrad has the largest s so far in the place of s.
    """

    amsgrad: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    sides: tuple[Observable, Observable] = (observables.step_left, observables.step_right)

    def memory(self, parameters: Tensor) -> dict[str, Tensor]:
        """What the rule remembers from step to step, before the first."""
        names = ["mean", "square", "largest_square"] if self.amsgrad else ["mean", "square"]
        powers = parameters.new_ones((*parameters.shape[:-1], 2), dtype=torch.float64)
        return {**{name: torch.zeros_like(parameters) for name in names}, "powers": powers}

    def direction(self, gradient: Tensor, memory: Memory) -> Tensor:
        """v′, with the memory brought forward."""
        first, second = self.betas
        mean = memory["mean"].lerp_(gradient, 1 - first)
        square = memory["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if self.amsgrad:
            largest = memory["largest_square"]
            square = torch.maximum(largest, square, out=largest)
        powers = memory["powers"]  # (β₁ᵗ, β₂ᵗ)
        powers[..., :1].mul_(first)
        powers[..., 1:].mul_(second)
        mean_bias, square_bias = (1 - powers).to(gradient.dtype).split(1, dim=-1)
        root = square.sqrt().div_(square_bias.sqrt()).add_(self.epsilon)
        return mean.neg().div_(root).div_(mean_bias)

    def snapshot(self, parameters: Tensor, gradient: Tensor, after: Tensor, lr: Tensor) -> Snapshot:
        """What the observables are read from; `after` is v′."""
        return Snapshot(parameters, gradient, after, lr)


Rule = SGD | Adam
