"""Check that a loss is deterministic and a mean over examples, as the relations require."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from equilibrate.watching.edits import kept_buffers, kept_generators

Batch = tuple[Tensor, Tensor]
"""(inputs, targets), with the examples on the first axis."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps (outputs, targets) to the mean over the examples, like the loss functions of torch."""

_EXAMPLES = 16
_TOLERANCE = 1e-2
"""Larger than the errors of reduced precision on a GPU, smaller than the effects of class weights,
BatchNorm or dropout on a loss or on its gradient."""
_REPEATED_TOLERANCE = 1e-3
"""For the same computation done twice, which atomic additions on a GPU may change by rounding."""
_SMALLEST = 1e-4
"""Smaller losses are compared with this value, because of their rounding errors."""


def require_mean_loss(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Require that the loss of a mini-batch is deterministic and is the mean over its examples.

    Only then is the mini-batch gradient an unbiased estimate of the full one, ⟦∇f^B⟧ = ∇f. The loss
    and the gradient of up to 16 examples are computed twice. Then those of each two successive
    examples are compared with the means over each by itself. The gradients matter: where the loss
    is the same for all examples, as it often is at initialization, its value does not depend on
    class weights. Each example is used twice, because some models do not accept a batch of one. A
    loss that is not finite is not checked. Neither the model nor the random state is changed.

    Args:
        model: The model, in the mode in which it will run, with a parameter that requires a
            gradient.
        loss: Maps (outputs, targets) to the loss of a batch.
        batch: Some examples. At most 16 are used, of as many classes as possible.

    Raises:
        ValueError: If the loss is not a scalar, changes from call to call, or is not the mean over
            the examples.

    Example:
        >>> batch = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
        >>> require_mean_loss(nn.Linear(2, 2), nn.functional.cross_entropy, batch)
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    inputs, targets = (t.to(parameters[0].device) for t in _representative(batch))

    def evaluate(*chosen: int) -> _Evaluation:
        index = torch.tensor(chosen, device=inputs.device).repeat(2)
        value = loss(model(inputs[index]), targets[index])
        if not isinstance(value, Tensor) or value.ndim != 0:
            is_tensor = isinstance(value, Tensor)
            got = f"shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise ValueError(
                f"loss must return a scalar tensor, the mean over the examples, got {got}: use "
                "reduction='mean'"
            )
        if not value.requires_grad:
            return _Evaluation(value.item(), torch.zeros(1))
        slopes = torch.autograd.grad(value, parameters, materialize_grads=True)
        return _Evaluation(value.item(), torch.cat([g.reshape(-1) for g in slopes]))

    places = list(range(len(inputs))) if len(inputs) > 1 else [0, 0]
    with torch.enable_grad(), kept_generators(model.parameters()), kept_buffers(model):
        once, again = evaluate(*places), evaluate(*places)
        changed = _difference(once, again, size=once.gradient.norm().item())
        if changed > _REPEATED_TOLERANCE:
            raise ValueError(
                f"the loss of the same examples was {once.value:.6g} and then {again.value:.6g}, "
                f"and its gradient changed by {changed:.2%}: the model must be deterministic; call "
                f"model.eval(), or remove its random layers and functions{_suspects(model)}"
            )
        before = evaluate(places[0])
        for last, place in pairwise(places):
            after, both = evaluate(place), evaluate(last, place)
            mean = _Evaluation(
                (before.value + after.value) / 2, (before.gradient + after.gradient) / 2
            )
            size = (before.gradient.norm() + after.gradient.norm()).item() / 2
            different = _difference(mean, both, size)
            if different > _TOLERANCE:
                raise ValueError(
                    f"the loss of two examples is {both.value:.6g}, but the mean over each of them "
                    f"is {mean.value:.6g}, and the gradients differ by {different:.2%}: the loss "
                    "must be a mean over independent examples; use reduction='mean' without class "
                    "weights, and model.eval() or nn.GroupNorm for layers that mix the examples "
                    f"of a batch{_suspects(model)}"
                )
            before = after


class _Evaluation(NamedTuple):
    value: float
    gradient: Tensor


def _difference(first: _Evaluation, second: _Evaluation, size: float) -> float:
    """Return the larger one of the relative differences of value and gradient, 0 if nan."""
    value = abs(first.value - second.value) / max(abs(first.value), _SMALLEST)
    slope = (first.gradient - second.gradient).norm().item() / size if size else 0.0
    return 0.0 if math.isnan(value + slope) else max(value, slope)


def _suspects(model: nn.Module) -> str:
    """Return a remark that names layers that may be random or mix examples."""
    found = [
        f"{name!r} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if isinstance(layer, _NormBase) or (isinstance(layer, _DropoutNd) and layer.training)
    ]
    return f" (see {', '.join(found)})" if found else ""


def _representative(batch: Batch) -> Batch:
    """Return a few examples, of as many classes as possible, always the same ones."""
    inputs, targets = batch
    order = torch.randperm(
        len(targets), generator=torch.Generator().manual_seed(0), device="cpu"
    ).numpy()
    if targets.ndim == 1 and not targets.is_floating_point():
        labels = targets.detach().cpu().numpy()[order]
        first = np.sort(np.unique(labels, return_index=True)[1])  # one example of each class
        order = np.concatenate([order[first], np.delete(order, first)])
    chosen = torch.from_numpy(order[:_EXAMPLES])
    return inputs[chosen.to(inputs.device)], targets[chosen.to(targets.device)]
