"""Update rules: how a gradient becomes a step θ′ = θ − ηu, and which relation the step obeys.

The direction u = −v′ is the velocity after the step with the opposite sign. Plain SGD therefore
uses the gradient itself as its direction, without a copy. Vectors are flat, with the parameters on
the last axis, and may have a leading axis of replicas. The state of a rule is kept in tensors that
are modified in place and never replaced, as CUDA graphs require.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from equilibrate import observables
from equilibrate.observables import Observable, Snapshot

Algorithm = Literal["sgd", "adam", "amsgrad"]
RuleState = Mapping[str, Tensor]
"""What an update rule keeps from step to step, by name."""


def zeros(parameters: Tensor) -> Tensor:
    """Make zeros with the shape and strides of flat parameters.

    Args:
        parameters: Flat parameters, (P,) or (R, P). The rows may be padded.

    Returns:
        Zeros of the same shape and strides; the padding of the rows is zero too.
    """
    if parameters.dim() == 1:
        return torch.zeros_like(parameters)
    replicas, size = parameters.shape
    return parameters.new_zeros((replicas, parameters.stride(0)))[:, :size]


@dataclass(frozen=True)
class SGD:
    """SGD as in the paper: v′ = μv − g, with v = 0 before the first step. It obeys FDR1′."""

    momentum: float = 0.0
    """μ."""
    sides: tuple[Observable, Observable] = (observables.fdr1_left, observables.fdr1_right)
    """Both sides of the relation."""

    def init_state(self, parameters: Tensor) -> dict[str, Tensor]:
        """Make the state before the first step.

        Args:
            parameters: Flat parameters, (…, P).

        Returns:
            The momentum buffer −v if there is momentum.
        """
        return {"momentum_buffer": zeros(parameters)} if self.momentum else {}

    def direction(self, gradient: Tensor, state: RuleState) -> Tensor:
        """Compute u = −v′ and update the state.

        Args:
            gradient: The gradient g with its L2 term, (…, P).
            state: The state, which is modified in place.

        Returns:
            The direction u. It may share memory with `gradient` or `state`.
        """
        if self.momentum:
            return state["momentum_buffer"].mul_(self.momentum).add_(gradient)
        return gradient

    def snapshot(
        self, parameters: Tensor, gradient: Tensor, direction: Tensor, lr: Tensor
    ) -> Snapshot:
        """Collect what the sides of the relation are computed from.

        Args:
            parameters: The parameters before the step, (…, P).
            gradient: The gradient with its L2 term, (…, P).
            direction: The direction u, (…, P).
            lr: The learning rate of each replica, (…).

        Returns:
            The snapshot, with u in place of v′: both sides are even in the velocity.
        """
        return Snapshot(parameters, gradient, direction, lr, self.momentum)


@dataclass(frozen=True)
class Adam:
    """Adam or AMSGrad with the usual defaults: v′ = −m̂/(√ŝ + ε).

    m and s are running means of g and g², and m̂ and ŝ are their bias-corrected values. AMSGrad uses
    the largest s so far instead of s. The rule obeys the step form of the relation.
    """

    amsgrad: bool = False
    """Whether to use the largest s so far."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means m and s."""
    epsilon: float = 1e-8
    """ε."""
    sides: tuple[Observable, Observable] = (observables.step_left, observables.step_right)
    """Both sides of the relation."""

    def init_state(self, parameters: Tensor) -> dict[str, Tensor]:
        """Make the state before the first step.

        Args:
            parameters: Flat parameters, (…, P).

        Returns:
            The running means, and the powers (β₁ᵗ, β₂ᵗ) for the bias correction.
        """
        names = ["mean", "square", "largest_square"] if self.amsgrad else ["mean", "square"]
        powers = parameters.new_ones((*parameters.shape[:-1], 2), dtype=torch.float64)
        return {**{name: zeros(parameters) for name in names}, "powers": powers}

    def advance_powers(self, state: RuleState) -> Tensor:
        """Increase t by one in the powers (β₁ᵗ, β₂ᵗ).

        Args:
            state: The state, which is modified in place.

        Returns:
            The powers, (…, 2).
        """
        powers = state["powers"]
        powers[..., :1].mul_(self.betas[0])
        powers[..., 1:].mul_(self.betas[1])
        return powers

    def direction(self, gradient: Tensor, state: RuleState) -> Tensor:
        """Compute u = −v′ and update the state.

        Args:
            gradient: The gradient g with its L2 term, (…, P).
            state: The state, which is modified in place.

        Returns:
            The direction u.
        """
        first, second = self.betas
        mean = state["mean"].lerp_(gradient, 1 - first)
        square = state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if self.amsgrad:
            largest = state["largest_square"]
            square = torch.maximum(largest, square, out=largest)
        powers = self.advance_powers(state)
        mean_bias, square_bias = (1 - powers).to(gradient.dtype).split(1, dim=-1)
        root = square.sqrt().div_(square_bias.sqrt()).add_(self.epsilon)
        return (mean / mean_bias).div_(root)

    def snapshot(
        self, parameters: Tensor, gradient: Tensor, direction: Tensor, lr: Tensor
    ) -> Snapshot:
        """Collect what the sides of the relation are computed from.

        Args:
            parameters: The parameters before the step, (…, P).
            gradient: The gradient with its L2 term, (…, P).
            direction: The direction u, (…, P).
            lr: The learning rate of each replica, (…).

        Returns:
            The snapshot.
        """
        return Snapshot(parameters, gradient, -direction, lr)


UpdateRule = SGD | Adam


def tensor_views(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """View flat vectors as the tensors they consist of.

    Args:
        flat: Flat vectors, (R, P).
        shapes: The shape of each tensor by name, in the order of the vectors.

    Returns:
        Views by name, (R, …).
    """
    pieces = flat.split([shape.numel() for shape in shapes.values()], dim=1)
    return {
        name: piece.view(len(flat), *shape)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


class FlatTensors(NamedTuple):
    """Flat tensors of some replicas, (…, P), and their learning rates."""

    parameters: Tensor
    """θ, (…, P)."""
    gradient: Tensor
    """Gradient of the loss without its L2 term, (…, P). An update may add the L2 term to it."""
    lr: Tensor
    """Learning rates in float64, (…)."""
    state: RuleState
    """State of the update rule."""

    def rows(self, rows: int | slice) -> FlatTensors:
        """Make views of some of the replicas.

        Args:
            rows: One replica, or a slice of replicas.

        Returns:
            Views of these replicas; those of a single replica have no leading axis.
        """
        state = {name: tensor[rows] for name, tensor in self.state.items()}
        return FlatTensors(self.parameters[rows], self.gradient[rows], self.lr[rows], state)
