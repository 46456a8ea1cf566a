"""Check that a loss is deterministic and a mean over examples, as the relations require."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""(inputs, targets), with the examples on the first axis."""

_EXAMPLES = 16
_TOLERANCE = 1e-2
"""Larger than the errors of reduced precision on a GPU, smaller than the effects of class weights,
BatchNorm or dropout on a loss or on its gradient."""
_REPEATED_TOLERANCE = 1e-3
"""For the same computation done twice, which atomic additions on a GPU may change by rounding."""
_SMALLEST = 1e-4
"""Smaller losses are compared with this value, because of their rounding errors."""


def representative_examples(batch: Batch, count: int = _EXAMPLES) -> Batch:
    """Choose a few examples, of as many classes as possible.

    Args:
        batch: (inputs, targets).
        count: Maximum number of examples to choose.

    Returns:
        At most `count` examples, always the same ones of the same batch.

    Example:
        >>> targets = torch.tensor([0] * 1000 + [1, 2])
        >>> representative_examples((targets, targets), 3)[1].sort().values.tolist()
        [0, 1, 2]
    """
    inputs, targets = batch
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0)).numpy()
    if targets.ndim == 1 and not targets.is_floating_point():
        labels = targets.detach().cpu().numpy()[order]
        first = np.sort(np.unique(labels, return_index=True)[1])  # one example of each class
        order = np.concatenate([order[first], np.delete(order, first)])
    chosen = torch.from_numpy(order[:count])
    return inputs[chosen.to(inputs.device)], targets[chosen.to(targets.device)]


def require_mean_loss(
    loss: Callable[[Batch], Tensor], parameters: Sequence[Tensor], examples: Batch
) -> None:
    """Require that the loss of a batch is deterministic and is the mean over its examples.

    For each two successive examples, the loss and the gradient of both together are compared with
    the means over each by itself. The gradients matter: where the loss is the same for all
    examples, as it often is at initialization, its value does not depend on class weights. Each
    example is used twice, because some models do not accept a batch of one example. A loss that is
    not finite is not checked.

    Args:
        loss: Maps a batch to its loss.
        parameters: The parameters of the gradient.
        examples: A few examples.

    Raises:
        ValueError: If the loss is not a scalar, changes from call to call, or is not the mean over
            the examples.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> examples = torch.randn(4, 2), torch.randn(4)
        >>> def loss(batch):
        ...     return (batch[0] @ w - batch[1]).square().mean()
        >>> require_mean_loss(loss, [w], examples)
    """
    inputs, targets = examples
    places = list(range(len(inputs))) if len(inputs) > 1 else [0, 0]

    def evaluate(*chosen: int) -> _Evaluation:
        index = torch.tensor(chosen, device="cpu").repeat(2)
        value = loss((inputs[index.to(inputs.device)], targets[index.to(targets.device)]))
        if not isinstance(value, Tensor) or value.ndim != 0:
            is_tensor = isinstance(value, Tensor)
            got = f"shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise ValueError(
                f"loss must return a scalar tensor, the mean over the examples, got {got}: use "
                "reduction='mean'"
            )
        return _Evaluation(value.item(), _gradient(value, parameters))

    # Random layers draw from the global generators, which must not be advanced here.
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    with torch.enable_grad(), torch.random.fork_rng(devices=list(devices)):
        once, again = evaluate(*places), evaluate(*places)
        changed = once.difference(again)
        if changed > _REPEATED_TOLERANCE:
            raise ValueError(
                f"the loss of the same examples was {once.value:.6g} and then {again.value:.6g}, "
                f"and its gradient changed by {changed:.2%}: the model must be deterministic; call "
                "model.eval(), or remove its random layers and functions"
            )
        before = evaluate(places[0])
        for last, place in pairwise(places):
            after = evaluate(place)
            both, mean = evaluate(last, place), before.mean(after)
            different = mean.difference(both, before.norm + after.norm)
            if different > _TOLERANCE:
                raise ValueError(
                    f"the loss of two examples is {both.value:.6g}, but the mean over each of them "
                    f"is {mean.value:.6g}, and the gradients differ by {different:.2%}: the loss "
                    "must be a mean over independent examples; use reduction='mean' without class "
                    "weights, and model.eval() for layers that mix the examples of a batch"
                )
            before = after


@dataclass(frozen=True)
class _Evaluation:
    """The loss of a batch and its gradient, with one tensor for each parameter."""

    value: float
    gradient: list[Tensor]

    @property
    def norm(self) -> float:
        return math.hypot(*(g.norm().item() for g in self.gradient))

    def mean(self, other: _Evaluation) -> _Evaluation:
        gradient = [(a + b) / 2 for a, b in zip(self.gradient, other.gradient, strict=True)]
        return _Evaluation((self.value + other.value) / 2, gradient)

    def difference(self, other: _Evaluation, twice_the_size: float | None = None) -> float:
        """Return the larger one of the relative differences of value and gradient, 0 if nan."""
        pairs = zip(self.gradient, other.gradient, strict=True)
        norm = math.hypot(*((a - b).norm().item() for a, b in pairs))
        size = (self.norm + other.norm if twice_the_size is None else twice_the_size) / 2
        value = abs(self.value - other.value) / max(abs(self.value), _SMALLEST)
        found = max(value, norm / size if size else 0.0)
        return 0.0 if math.isnan(found) else found


def _gradient(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    if not loss.requires_grad:
        return []
    return list(torch.autograd.grad(loss, list(parameters), materialize_grads=True))
