"""Parameters that are distributed over processes: local parts, and sums over all of them.

A squared norm or inner product of a sharded tensor is the sum of those of its shards, so processes
only exchange a few numbers, and only when a reading is asked for. Tensors are never gathered.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


def as_dtensor(tensor: Tensor | None) -> Any | None:
    """Return the tensor if it is a DTensor, None otherwise.

    Importing DTensor takes longer than the rest of this package, and nobody can have made one
    before the module was imported.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, getattr(module, "DTensor", ())):
        return None
    return tensor


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    distributed = as_dtensor(tensor)
    return tensor if distributed is None else distributed.to_local()


def same_layout(param: Tensor, other: Tensor | None) -> bool:
    """Return whether `other` is distributed as the parameter is, so that local parts fit together.

    A partial gradient (each process holds a summand) does not: its square is not a sum of squares.
    """
    first, second = as_dtensor(param), as_dtensor(other)
    if other is None or first is None:
        return True
    return second is not None and tuple(second.placements) == tuple(first.placements)


@dataclass(frozen=True)
class Layout:
    """How the parameters of a bucket are distributed: over which groups sums are to be added.

    Hashable, so that parameters of one layout share a bucket.
    """

    groups: tuple[Any, ...] = ()
    """Process groups, one for each mesh dimension along which tensors are sharded."""

    def total(self, sums: Tensor) -> Tensor:
        """Return the sums over all processes. Every process of the groups must call it."""
        for group in self.groups:
            sums = sums.clone()
            backend = dist.get_backend(group)
            moved = sums.cpu() if backend == "gloo" else sums
            dist.all_reduce(moved, group=group)
            sums = moved.to(sums.device)
        return sums

    @property
    def processes(self) -> int:
        """Number of processes that a total is taken over."""
        size = 1
        for group in self.groups:
            size *= dist.get_world_size(group)
        return size


def layout_of(param: Tensor, process_group: Any | None) -> Layout:
    """Return over which groups the sums of a parameter are to be added.

    Args:
        param: A plain tensor, or a DTensor.
        process_group: The group over which plain parameters are sharded, if they are.

    Returns:
        The groups of those mesh dimensions along which the parameter is sharded. Along the others
        it is replicated, and each process has the whole sum.

    Raises:
        ValueError: If the parameter is partial, or flattened by FSDP1 and no group was given.
    """
    distributed = as_dtensor(param)
    if distributed is not None:
        groups = []
        for dimension, placement in enumerate(distributed.placements):
            if placement.is_shard():
                groups.append(distributed.device_mesh.get_group(dimension))
            elif not placement.is_replicate():
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} has the placement {placement}, "
                    "which has no norm of its own: redistribute it to Shard or Replicate first"
                )
        return Layout(tuple(groups))
    if process_group is not None:
        return Layout((process_group,))
    if getattr(param, "_fsdp_flattened", False):  # set by FullyShardedDataParallel
        raise ValueError(
            "the optimizer holds shards of FullyShardedDataParallel (FSDP1): pass "
            "process_group=torch.distributed.group.WORLD (or the group it shards over), or use "
            "torch.distributed.fsdp.fully_shard"
        )
    return Layout()
