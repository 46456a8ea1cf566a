"""Parameters that are distributed over processes: local parts, and sums over all of them.

A squared norm or inner product of a sharded tensor is the sum of those of its shards. So processes
only exchange a few numbers, and only when a reading is asked for. Parameters are never gathered.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
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


def shard_index(param: Tensor, layout: Layout) -> int:
    """Return a number that differs between the shards of a parameter, and not between replicas."""
    index = 0
    for group in layout.groups(param):
        index = index * dist.get_world_size(group) + dist.get_rank(group)
    return index


class Layout:
    """How the parameters of an optimizer are distributed, and sums over the processes.

    A sum is added up over every group along which any parameter is sharded, all in one collective
    for each group. What a parameter that is not sharded along it contributes is divided by the
    number of its processes. Groups come in the order of the parameters, which is the same on every
    process, so that collectives match.

    Args:
        params: All parameters of the optimizer: plain tensors, DTensors, or both.
        process_group: The group over which FSDP1 has sharded the plain ones, if it has.

    Raises:
        ValueError: If a parameter is partial, parameters are shards of FSDP1 but no group was
            given, or a group was given that does not fit.
    """

    def __init__(self, params: Sequence[Tensor], process_group: Any | None = None) -> None:
        _check_process_group(params, process_group)
        self._groups: dict[str, Any] = {}
        self._names: dict[int, list[str]] = {}
        for p in params:
            groups = [g for g in _groups_of(p, process_group) if dist.get_world_size(g) > 1]
            self._names[id(p)] = [group.group_name for group in groups]
            self._groups |= {group.group_name: group for group in groups}
        self._sizes = {name: dist.get_world_size(group) for name, group in self._groups.items()}
        self._shapes = self._shapes_of([p for p in params if _is_flattened(p)])

    @property
    def processes(self) -> int:
        """Number of processes that a total is taken over."""
        return math.prod(self._sizes.values())

    def shards(self, param: Tensor) -> int:
        """Return the number of shards of a parameter."""
        return math.prod(self._sizes[name] for name in self._names[id(param)])

    def groups(self, param: Tensor) -> list[Any]:
        """Return the groups of processes over which a parameter is sharded."""
        return [self._groups[name] for name in self._names[id(param)]]

    def shape(self, param: Tensor) -> list[int]:
        """Return the shape of a parameter, the same on every process; FSDP1 has flattened it."""
        return self._shapes.get(id(param), list(param.shape))

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

    def _shapes_of(self, flattened: Sequence[Tensor]) -> dict[int, list[int]]:
        if not flattened:
            return {}
        numbers = [float(p.numel()) for p in flattened]
        sizes = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        (sizes,) = self.total([sizes])
        shapes = {id(p): [int(n)] for p, n in zip(flattened, sizes.tolist(), strict=True)}
        for p in flattened:  # without its padding, which depends on the number of processes
            if (unpadded := getattr(p, "_unpadded_unsharded_size", None)) is not None:
                shapes[id(p)] = list(unpadded)
        return shapes


def _groups_of(param: Tensor, process_group: Any | None) -> list[Any]:
    """Return the groups over which a parameter is sharded, one for each mesh dimension.

    Raises:
        ValueError: If the parameter is partial.
    """
    distributed = as_dtensor(param)
    if distributed is None:
        return [process_group] if _is_flattened(param) else []
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


def _is_flattened(param: Tensor) -> bool:
    """Return whether FullyShardedDataParallel (FSDP1) has flattened and sharded a parameter."""
    return as_dtensor(param) is None and getattr(param, "_fsdp_flattened", False)


def _check_process_group(params: Sequence[Tensor], process_group: Any | None) -> None:
    flattened = any(map(_is_flattened, params))
    if flattened and process_group is None:
        raise ValueError(
            "the optimizer holds shards of FullyShardedDataParallel (FSDP1): pass "
            "eq.Monitor(optimizer, process_group=torch.distributed.group.WORLD), or the group it "
            "shards over, and that monitor to FDRScheduler(optimizer, monitor=monitor); or use "
            "torch.distributed.fsdp.fully_shard"
        )
    if process_group is None:
        return
    if not flattened:
        raise ValueError(
            "process_group is only for shards of FullyShardedDataParallel (FSDP1), and the "
            "optimizer holds none: leave it out. DTensors know their groups, and parameters of "
            "DistributedDataParallel are whole on every process"
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError(
            "this process is not a member of process_group: pass the group over which "
            "FullyShardedDataParallel shards the parameters"
        )


def device_for(group: Any, device: torch.device) -> torch.device:
    """Return the device on which a group, or the default one, reduces numbers of a device."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if backends.get(device.type, "gloo") != "gloo":  # NCCL, for example
        return device
    return torch.device("cpu" if "cpu" in backends else next(iter(backends)))
