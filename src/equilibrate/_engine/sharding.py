"""Parameters that are distributed over processes: local parts, and sums over all of them.

A squared norm or inner product of a sharded tensor is the sum of those of its shards, so processes
only exchange a few numbers, and only when a reading is asked for. Tensors are never gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

_DISTRIBUTED = dist.is_available()
if _DISTRIBUTED:
    from torch.distributed.tensor import DTensor, Replicate, Shard


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    if _DISTRIBUTED and isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor."""
    return _DISTRIBUTED and isinstance(tensor, DTensor)


def is_flat_shard(tensor: Tensor) -> bool:
    """Return whether `FullyShardedDataParallel` (FSDP1) has flattened and sharded the parameter."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def same_layout(param: Tensor, other: Tensor | None) -> bool:
    """Return whether `other` is distributed as the parameter is, so that local parts fit together.

    A partial gradient (each process holds a summand) does not: its square is not a sum of squares.
    """
    if other is None or not _DISTRIBUTED or not isinstance(param, DTensor):
        return True
    return isinstance(other, DTensor) and tuple(other.placements) == tuple(param.placements)


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
    if _DISTRIBUTED and isinstance(param, DTensor):
        mesh = param.device_mesh
        groups = []
        for dimension, placement in enumerate(param.placements):
            if isinstance(placement, Shard):
                groups.append(mesh.get_group(dimension))
            elif not isinstance(placement, Replicate):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} has the placement {placement}, "
                    "which has no norm of its own: redistribute it to Shard or Replicate first"
                )
        return Layout(tuple(groups))
    if process_group is not None:
        return Layout((process_group,))
    if is_flat_shard(param):
        raise ValueError(
            "the optimizer holds shards of FullyShardedDataParallel (FSDP1): pass "
            "process_group=torch.distributed.group.WORLD (or the group it shards over), or use "
            "torch.distributed.fsdp.fully_shard"
        )
    return Layout()
