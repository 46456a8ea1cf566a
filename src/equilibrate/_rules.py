"""Update rules on flat parameters: the direction v′ of a step θ′ = θ + ηv′, from the gradient.

State lives in tensors that are written in place and never replaced, as a CUDA graph wants it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibrate import observables
from equilibrate.observables import Observable, Snapshot

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class SGD:
    """v′ = μv − (1−ν)g, with v = 0 before the first step; its relation is FDR1′."""

    momentum: float = 0.0
    dampening: float = 0.0
    sides: tuple[Observable, Observable] = (observables.fdr1_left, observables.fdr1_right)

    def state(self, parameters: Tensor) -> Tensors:
        """What the rule remembers from step to step."""
        return {"velocity": torch.zeros_like(parameters)} if self.momentum else {}

    def direction(self, gradient: Tensor, state: Tensors) -> Tensor:
        """v′, with the state brought forward."""
        if not self.momentum:
            return gradient * (self.dampening - 1)
        return state["velocity"].mul_(self.momentum).sub_(gradient, alpha=1 - self.dampening)

    def snapshot(self, parameters: Tensor, gradient: Tensor, after: Tensor, lr: Tensor) -> Snapshot:
        """What the observables are read from."""
        return Snapshot(parameters, gradient, after, lr, self.momentum, self.dampening)


@dataclass(frozen=True)
class Adam:
    """v′ = −m̂/(√ŝ + ε) with the usual defaults, or AMSGrad; its relation is the step form.

    m and s are running means of g and g², m̂ and ŝ the same without their bias towards zero;
    AMSGrad puts the largest s so far in place of s.
    """

    amsgrad: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    sides: tuple[Observable, Observable] = (observables.step_left, observables.step_right)

    def state(self, parameters: Tensor) -> Tensors:
        """What the rule remembers from step to step."""
        names = ["mean", "square"] + (["largest_square"] if self.amsgrad else [])
        state = {name: torch.zeros_like(parameters) for name in names}
        decay = torch.ones(len(parameters), 2, dtype=torch.float64, device=parameters.device)
        return {**state, "decay": decay}

    def direction(self, gradient: Tensor, state: Tensors) -> Tensor:
        """v′, with the state brought forward."""
        first, second = self.betas
        mean = state["mean"].lerp_(gradient, 1 - first)
        square = state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if self.amsgrad:
            square = torch.maximum(state["largest_square"], square, out=state["largest_square"])
        decay = state["decay"]  # (β₁ᵗ, β₂ᵗ)
        decay[..., 0].mul_(first)
        decay[..., 1].mul_(second)
        bias, square_bias = (1 - decay).to(gradient.dtype).unsqueeze(-1).unbind(-2)
        root = square.sqrt().div_(square_bias.sqrt()).add_(self.epsilon)
        return mean.neg().div_(root).div_(bias)

    def snapshot(self, parameters: Tensor, gradient: Tensor, after: Tensor, lr: Tensor) -> Snapshot:
        """What the observables are read from."""
        return Snapshot(parameters, gradient, after, lr)


Rule = SGD | Adam
