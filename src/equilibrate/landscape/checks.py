"""Checks for losses that would give wrong results without an error."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from equilibrate.landscape.data import Batch

_RELATIVE_TOLERANCE = 1e-2
"""Larger than the errors of reduced precision on a GPU, smaller than the effects of BatchNorm or
dropout on a loss."""
_ABSOLUTE_TOLERANCE = 1e-6


def require_mean_loss(loss: Callable[[Batch], Tensor], batch: Batch) -> None:
    """Require that the loss of a batch is deterministic and is the mean over its examples.

    The loss is evaluated twice on the batch and once on each of its halves. A batch with a single
    example is not checked.

    Args:
        loss: Maps a batch to its loss.
        batch: A few examples.

    Raises:
        ValueError: If the loss is not a scalar, changes from call to call, or differs from the mean
            over the halves of the batch.
    """
    half = len(batch[0]) // 2
    if half == 0:
        return
    # Random layers draw from the global generator, which must not be advanced here.
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        both = batch[0][: 2 * half], batch[1][: 2 * half]
        first, second = ((t[:half], t[half:]) for t in both)
        whole, again = loss(both), loss(both)
        parts = loss((first[0], second[0])), loss((first[1], second[1]))
    if whole.ndim != 0:
        raise ValueError(
            f"loss must return a scalar, the mean over the examples, got shape "
            f"{tuple(whole.shape)}: use reduction='mean'"
        )
    one, two, mean = whole.item(), again.item(), sum(p.item() for p in parts) / 2
    if not _is_close(one, two):
        raise ValueError(
            f"the loss of the same examples was {one:.6g} and then {two:.6g}: the model must be "
            "deterministic; call model.eval(), or remove its random layers"
        )
    if not _is_close(one, mean):
        raise ValueError(
            f"the loss of {2 * half} examples is {one:.6g}, but the mean over its halves is "
            f"{mean:.6g}: the loss must be a mean over independent examples; use reduction='mean' "
            "without class weights, and model.eval() for layers that mix the examples of a batch"
        )


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
