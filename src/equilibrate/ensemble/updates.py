"""How a gradient becomes a step θ′ = θ − ηu, and what is measured on the way.

The pull u = −v′ is the paper's velocity after the step with its sign turned: so plain SGD pulls
along the gradient itself, and no copy of it is made. Vectors are flat, with the parameters on the
last axis; any leading axis (replicas) is kept. What a rule remembers lives in tensors that are
written in place and never replaced, as a CUDA graph wants it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from equilibrate import observables
from equilibrate.observables import Observable, Snapshot, inner

Algorithm = Literal["sgd", "adam", "amsgrad"]
Memory = Mapping[str, Tensor]


def zeros(parameters: Tensor) -> Tensor:
    """Zeros laid out as `parameters`; where its rows lie apart, between them and after the last."""
    if parameters.dim() == 1:
        return torch.zeros_like(parameters)
    replicas, size = parameters.shape
    return parameters.new_zeros((replicas, parameters.stride(0)))[:, :size]


def aligned(parameters: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 64 bytes: wider loads are faster."""
    replicas, size = parameters.shape
    return parameters.new_zeros(replicas, -(-size // 16) * 16)[:, :size].copy_(parameters)


@dataclass(frozen=True)
class SGD:
    """v′ = μv − (1−ν)g, with v = 0 before the first step; its relation is FDR1′."""

    momentum: float = 0.0
    dampening: float = 0.0
    sides: tuple[Observable, Observable] = (observables.fdr1_left, observables.fdr1_right)

    def memory(self, parameters: Tensor) -> dict[str, Tensor]:
        """What the rule remembers from step to step, before the first."""
        return {"pull": zeros(parameters)} if self.momentum else {}

    def pull(self, gradient: Tensor, memory: Memory) -> Tensor:
        """−v′, with the memory brought forward."""
        if self.momentum:
            return memory["pull"].mul_(self.momentum).add_(gradient, alpha=1 - self.dampening)
        return gradient * (1 - self.dampening) if self.dampening else gradient

    def snapshot(self, parameters: Tensor, gradient: Tensor, pull: Tensor, lr: Tensor) -> Snapshot:
        """What the sides are read from; both are even in the velocity."""
        return Snapshot(parameters, gradient, pull, lr, self.momentum, self.dampening)


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
        return {**{name: zeros(parameters) for name in names}, "powers": powers}

    def advance(self, memory: Memory) -> Tensor:
        """(β₁ᵗ, β₂ᵗ), with t brought forward."""
        powers = memory["powers"]
        powers[..., :1].mul_(self.betas[0])
        powers[..., 1:].mul_(self.betas[1])
        return powers

    def pull(self, gradient: Tensor, memory: Memory) -> Tensor:
        """−v′, with the memory brought forward."""
        first, second = self.betas
        mean = memory["mean"].lerp_(gradient, 1 - first)
        square = memory["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if self.amsgrad:
            largest = memory["largest_square"]
            square = torch.maximum(largest, square, out=largest)
        mean_bias, square_bias = (1 - self.advance(memory)).to(gradient.dtype).split(1, dim=-1)
        root = square.sqrt().div_(square_bias.sqrt()).add_(self.epsilon)
        return (mean / mean_bias).div_(root)

    def snapshot(self, parameters: Tensor, gradient: Tensor, pull: Tensor, lr: Tensor) -> Snapshot:
        """What the sides are read from."""
        return Snapshot(parameters, gradient, -pull, lr)


Rule = SGD | Adam


def rule_of(algorithm: str, momentum: float, dampening: float) -> Rule:
    """The rule of an algorithm; refuses numbers that it does not take.

    >>> rule_of("sgd", 0.9, 0.0).momentum
    0.9
    """
    if algorithm == "sgd":
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        if not dampening < 1:
            raise ValueError(
                f"dampening must be below 1, got {dampening}: no gradient would reach the velocity"
            )
        return SGD(momentum, dampening)
    if algorithm not in ("adam", "amsgrad"):
        raise ValueError(f'algorithm must be "sgd", "adam" or "amsgrad", got {algorithm!r}')
    if momentum or dampening:
        raise ValueError(
            f"algorithm={algorithm!r} takes no momentum or dampening, got {momentum}, {dampening}"
        )
    return Adam(amsgrad=algorithm == "amsgrad")


class Flat(NamedTuple):
    """Flat tensors of some replicas, (…, P), with their learning rates (…)."""

    parameters: Tensor
    gradient: Tensor
    """Of the loss without its L2 term; `update` adds that to it."""
    lr: Tensor
    memory: Memory

    def rows(self, rows: int | slice) -> Flat:
        """Views of some of the replicas; of one alone it has no leading axis."""
        memory = {name: tensor[rows] for name, tensor in self.memory.items()}
        return Flat(self.parameters[rows], self.gradient[rows], self.lr[rows], memory)


def update(flat: Flat, rule: Rule, weight_decay: float, loss: Tensor, row: Tensor) -> None:
    """Make one step in place, and write what it measures into `row` (…, 4).

    Columns: both sides of the rule's relation; the loss as given; v·g with the velocity before the
    step, zero where the rule remembers none. The loss and `row` are in double precision.

    >>> flat = Flat(torch.ones(2), torch.tensor([1.0, 0.0]), torch.tensor(0.5), {})
    >>> row = torch.empty(4, dtype=torch.float64)
    >>> update(flat, SGD(), 0.0, row.new_tensor(3.0), row)
    >>> flat.parameters.tolist(), row.tolist()
    ([0.5, 1.0], [1.0, 0.25, 3.0, 0.0])
    """
    flat.gradient.add_(flat.parameters, alpha=weight_decay)
    before = flat.memory.get("pull")
    work = torch.zeros_like(loss) if before is None else -inner(before, flat.gradient)
    pull = rule.pull(flat.gradient, flat.memory)
    snapshot = rule.snapshot(flat.parameters, flat.gradient, pull, flat.lr)
    left, right = (side(snapshot) for side in rule.sides)
    torch.stack([left, right, loss, work], dim=-1, out=row)
    flat.parameters.addcmul_(pull, flat.lr.to(pull.dtype).unsqueeze(-1), value=-1)
