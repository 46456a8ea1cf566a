"""Optimizers and parameters that a monitor accepts, and how parameters are measured together."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate._arguments import check_steps
from equilibrate._engine.sharding import local

Bucket = tuple[int, list[Tensor]]
"""Index of a parameter group, and those of its parameters that share a device and a dtype."""


def check_arguments(optimizer: Optimizer, every: Any) -> int:
    """Check what a monitor or a forecaster is created with.

    Returns:
        `every`, as one of Python's numbers.

    Raises:
        ValueError: If the optimizer has no parameters or `every` is below 1.
    """
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("optimizer has no parameters: pass model.parameters() to it first")
    return check_steps("every", every)


def all_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def buckets(optimizer: Optimizer) -> list[Bucket]:
    """Return the parameters of an optimizer by group, device and dtype.

    Raises:
        TypeError: If one is complex, or on a device without float64.
    """
    found: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for i, group in enumerate(optimizer.param_groups):
        if any(p.is_complex() for p in group["params"]):
            raise TypeError(
                f"parameter group {i} has complex parameters, which have no FDR1 reading here; "
                "optimize torch.view_as_real of them instead"
            )
        if any(p.device.type == "mps" for p in group["params"]):
            raise TypeError(
                f"parameter group {i} is on an MPS device, which has no float64: a monitor needs "
                "a CPU or a CUDA device"
            )
        for p in group["params"]:
            found.setdefault((i, local(p).device, p.dtype), []).append(p)
    return [(group, params) for (group, _, _), params in found.items()]


class Places:
    """Which parameters an optimizer holds, and where each of its buckets lies.

    Args:
        optimizer: The optimizer.
        found: Its buckets.
    """

    def __init__(self, optimizer: Optimizer, found: list[Bucket]) -> None:
        self._optimizer = optimizer
        self._params = all_parameters(optimizer)
        self._firsts = [(params[0], local(params[0]).device) for _, params in found]

    def have_same_parameters(self) -> bool:
        """Return whether the optimizer still holds the same parameters, wherever they are."""
        now = all_parameters(self._optimizer)
        return len(now) == len(self._params) and all(map(is_, now, self._params))

    def are_unchanged(self) -> bool:
        """Return whether parameters were neither exchanged nor moved to another device."""
        return self.have_same_parameters() and all(
            local(p).device == device for p, device in self._firsts
        )
