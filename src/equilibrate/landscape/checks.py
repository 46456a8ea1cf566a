"""Losses of which a landscape reading would be wrong without anyone noticing."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from equilibrate.landscape.examples import Batch

_TOLERANCE = 1e-2
"""Wide enough for reduced precision on a GPU, far below what BatchNorm or dropout do to a loss."""
_ROUNDING = 1e-6


def refuse_losses_that_are_no_mean(loss: Callable[[Batch], Tensor], batch: Batch) -> None:
    """Try the loss on a few examples: the same twice, and its halves' mean for the whole."""
    half = len(batch[0]) // 2
    if half == 0:
        return
    # Random layers draw from the global state, which is not ours to advance.
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        both = batch[0][: 2 * half], batch[1][: 2 * half]
        first, second = ((t[:half], t[half:]) for t in both)
        whole, again = loss(both), loss(both)
        parts = loss((first[0], second[0])), loss((first[1], second[1]))
    if whole.ndim != 0:
        raise ValueError(
            f"loss must return one number, the mean over the examples, got shape "
            f"{tuple(whole.shape)}: use reduction='mean'"
        )
    one, two, mean = whole.item(), again.item(), sum(p.item() for p in parts) / 2
    if not math.isclose(one, two, rel_tol=_TOLERANCE, abs_tol=_ROUNDING):
        raise ValueError(
            f"the loss of the same examples was {one:.6g} and then {two:.6g}: something in the "
            "model is left to chance; call model.eval(), or switch it off"
        )
    if not math.isclose(one, mean, rel_tol=_TOLERANCE, abs_tol=_ROUNDING):
        raise ValueError(
            f"the loss of {2 * half} examples is {one:.6g}, but the mean over its halves is "
            f"{mean:.6g}: it must be a mean over examples that do not see each other; use "
            "reduction='mean' without class weights, and model.eval() where layers mix a batch"
        )
