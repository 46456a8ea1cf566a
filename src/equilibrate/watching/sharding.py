"""Parameters that are distributed over processes: local parts, and sums over all of them.

A squared norm or inner product of a sharded tensor is the sum of those of its shards. So processes
only exchange a few numbers, and only when a reading is asked for. Parameters are never gathered.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
    if distributed is None:
        return tensor
    part = distributed.to_local()
    return part.wait() if hasattr(part, "wait") else part  # the result of a running collective


def local_like(param: Tensor, other: Tensor | None) -> Tensor | None:
    """Return the local part of a gradient or buffer, distributed as its parameter is.

    Under tensor parallelism a gradient may be partial: each process holds a summand. It is added up
    first, as the optimizer itself does at every step, because its square is not a sum of squares.
    """
    first, second = as_dtensor(param), as_dtensor(other)
    if other is None or first is None or second is None:
        return other
    if tuple(second.placements) != tuple(first.placements):
        second = second.redistribute(first.device_mesh, first.placements)
    return local(second)


def distribute_like(param: Tensor, part: Tensor) -> Tensor:
    """Return the local part of a mean as a tensor that is distributed as its parameter is."""
    distributed = as_dtensor(param)
    if distributed is None:
        return part
    return type(distributed).from_local(
        part,
        distributed.device_mesh,
        distributed.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


@contextmanager
def regathered(model: nn.Module | None) -> Iterator[None]:
    """Let FSDP2 gather parameters again in a block that changes them, and after it.

    FSDP2 keeps those of the root module gathered after a forward pass without a backward pass. The
    next pass would use this copy, whatever the parameters of the optimizer are by then.

    Args:
        model: The model; None if there is nothing to do.

    Yields:
        None.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    modules = () if model is None else model.modules()
    gathered: list[Any] = [module for module in modules if isinstance(module, kind)]
    try:
        for module in gathered:
            module.reshard()
        yield
    finally:
        for module in gathered:
            module.reshard()


class Layout:
    """How the parameters of an optimizer are distributed, and sums over the processes.

    A sum is added up over every group along which any parameter is sharded, all in one collective
    for each group. What a parameter that is not sharded along it contributes is divided by the
    number of its processes. Groups come in the order of the parameters, which is the same on every
    process, so that collectives match.

    Args:
        params: All parameters of the optimizer: plain tensors, DTensors, or both.

    Raises:
        ValueError: If a parameter is partial, or a shard of FSDP1.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._groups: dict[str, Any] = {}
        self._names: dict[int, list[str]] = {}
        for p in params:
            groups = [g for g in _groups_of(p) if dist.get_world_size(g) > 1]
            self._names[id(p)] = [group.group_name for group in groups]
            self._groups |= {group.group_name: group for group in groups}
        self._sizes = {name: dist.get_world_size(group) for name, group in self._groups.items()}

    @property
    def processes(self) -> int:
        """Number of processes that a total is taken over."""
        return math.prod(self._sizes.values())

    def shards(self, param: Tensor) -> int:
        """Return the number of shards of a parameter."""
        return math.prod(self._sizes[name] for name in self._names[id(param)])

    def shard_index(self, param: Tensor) -> int:
        """Return a number that differs between the shards of a parameter, not between replicas."""
        index = 0
        for name in self._names[id(param)]:
            index = index * self._sizes[name] + dist.get_rank(self._groups[name])
        return index

    def total(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return sums over all processes, on the host. Every process must call it."""
        if not parts:
            return []
        flat = torch.cat([part.reshape(-1).to(parts[0].device) for part in parts])
        for group in self._groups.values():
            flat = flat.to(device_for(group, flat.device))
            dist.all_reduce(flat, group=group)
        pieces = flat.cpu().split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def mean_over_processes(values: Tensor) -> Tensor:
    """Return the mean over all processes of the default group, each of which must call it.

    Args:
        values: Numbers of the host, as many on each process.

    Returns:
        Numbers of the host; those of this process, as they are, if there is no other.
    """
    if not _has_others():
        return values
    total = values.to(device_for(None, values.device), copy=True)  # NCCL adds up on GPUs only
    dist.all_reduce(total)
    return total.cpu() / dist.get_world_size()


def share_mean(values: Tensor) -> None:
    """Replace numbers by their mean over all processes, each of which must call it."""
    if _has_others():
        values.copy_(mean_over_processes(values.cpu()))


def are_alike(numbers: Sequence[int]) -> list[bool]:
    """Return which of some numbers are the same on all processes, each of which must call it.

    Args:
        numbers: Whole numbers, as many on each process.
    """
    if not _has_others():
        return [True] * len(numbers)
    own = torch.tensor([*numbers, *(-number for number in numbers)], device="cpu")
    largest = own.to(device_for(None, own.device), copy=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return (largest.cpu() == own).view(2, -1).all(0).tolist()


def device_for(group: Any, device: torch.device) -> torch.device:
    """Return the device on which a group, or the default one, reduces numbers of a device."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if backends.get(device.type, "gloo") != "gloo":  # NCCL, for example
        return device
    return torch.device("cpu" if "cpu" in backends else next(iter(backends)))


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _groups_of(param: Tensor) -> list[Any]:
    """Return the groups over which a parameter is sharded, one for each mesh dimension.

    Raises:
        ValueError: If it is partial, or a shard of FSDP1.
    """
    distributed = as_dtensor(param)
    if distributed is None:
        if getattr(param, "_fsdp_flattened", False):
            raise ValueError(
                "the optimizer holds shards of FullyShardedDataParallel (FSDP1), which are not "
                "supported: shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        return []
    groups = []
    for dimension, placement in enumerate(distributed.placements):
        if placement.is_partial():
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has the placement {placement}, "
                "which has no norm of its own: redistribute it to Shard or Replicate first"
            )
        if not placement.is_replicate():  # Shard, or the strided one of FSDP2 over another
            groups.append(distributed.device_mesh.get_group(dimension))
    return groups
