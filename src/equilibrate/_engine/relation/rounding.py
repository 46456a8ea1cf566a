"""Steps that are lost in the rounding of the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.optim import Optimizer


def rounding_floor(optimizer: Optimizer, lrs: Sequence[float], norm: float) -> float:
    """Return the right side of FDR1 below which steps are lost in rounding.

    That is the case for |Δ| < 2ε|θ|, and where gradient and weight decay cancel to within ε.

    Args:
        optimizer: The optimizer.
        lrs: Learning rate of each group.
        norm: |θ|².
    """
    if not math.isfinite(norm):
        return 0.0
    epsilon = torch.finfo(torch.float32).eps
    floor = 0.0
    for lr, group in zip(lrs, optimizer.param_groups, strict=True):
        single = any(p.dtype is torch.float32 for p in group["params"])
        decay = group.get("weight_decay", 0.0)
        if single and lr > 0 and isinstance(decay, float | int):
            floor += 2 * epsilon**2 * norm / lr + 4 * epsilon * lr * decay**2 * norm
    return floor
