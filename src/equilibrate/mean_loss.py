"""Check that a loss is deterministic and a mean over examples, as the relations require."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""(inputs, targets), with the examples on the first axis."""
Gradient = list[Tensor]
"""One tensor for each parameter."""

_EXAMPLES = 16
_TOLERANCE = 1e-2
"""Larger than the errors of reduced precision on a GPU, smaller than the effects of class weights,
BatchNorm or dropout on a loss or on its gradient."""
_REPEATED_TOLERANCE = 1e-3
"""For the same computation done twice, which atomic additions on a GPU may change by rounding."""


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

    The loss and its gradient over all examples are compared with the means over the examples one by
    one. The gradients matter: where the loss is the same for all examples, as it often is at
    initialization, its value does not depend on class weights. Each example is used twice, because
    some models do not accept a batch of one example. A loss that is not finite is not checked.

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
        >>> require_mean_loss(
        ...     lambda batch: (batch[0] @ w - batch[1]).square().mean(), [w], examples
        ... )
    """
    inputs, targets = examples
    pairs = [torch.full((2,), i) for i in range(len(inputs))]
    pairs = pairs if len(pairs) > 1 else 2 * pairs

    def evaluate(chosen: Tensor) -> tuple[float, Gradient]:
        value = loss((inputs[chosen.to(inputs.device)], targets[chosen.to(targets.device)]))
        if not isinstance(value, Tensor) or value.ndim != 0:
            is_tensor = isinstance(value, Tensor)
            got = f"shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise ValueError(
                f"loss must return a scalar tensor, the mean over the examples, got {got}: use "
                "reduction='mean'"
            )
        return value.item(), _gradient(value, parameters)

    # Random layers draw from the global generators, which must not be advanced here.
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    with torch.enable_grad(), torch.random.fork_rng(devices=list(devices)):
        (value, whole), (again, repeated) = evaluate(torch.cat(pairs)), evaluate(torch.cat(pairs))
        changed = _norm(_minus(whole, repeated))
        mean = size = 0.0
        for pair in pairs:  # `whole` becomes the difference from the mean over the pairs
            one, gradient = evaluate(pair)
            mean += one / len(pairs)
            size += _norm(gradient) / len(pairs)
            whole = _minus(whole, gradient, 1 / len(pairs))
    if not math.isfinite(value + again + mean + size):
        return
    changed, different = (norm / size if size else 0.0 for norm in (changed, _norm(whole)))
    if not _is_close(value, again, _REPEATED_TOLERANCE) or changed > _REPEATED_TOLERANCE:
        raise ValueError(
            f"the loss of the same examples was {value:.6g} and then {again:.6g}, and its gradient "
            f"changed by {changed:.2%}: the model must be deterministic; call model.eval(), or "
            "remove its random layers and functions"
        )
    if not _is_close(value, mean, _TOLERANCE) or different > _TOLERANCE:
        raise ValueError(
            f"the loss of {2 * len(pairs)} examples is {value:.6g}, but the mean over the same "
            f"examples one by one is {mean:.6g}, and the gradients differ by {different:.2%}: the "
            "loss must be a mean over independent examples; use reduction='mean' without class "
            "weights, and model.eval() for layers that mix the examples of a batch"
        )


def _gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Gradient:
    if not loss.requires_grad:
        return []
    return list(torch.autograd.grad(loss, list(parameters), materialize_grads=True))


def _minus(gradient: Gradient, other: Gradient, weight: float = 1.0) -> Gradient:
    return [g - weight * o for g, o in zip(gradient, other, strict=True)]


def _norm(gradient: Gradient) -> float:
    return math.hypot(*(g.norm().item() for g in gradient))


def _is_close(a: float, b: float, tolerance: float) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-6)
