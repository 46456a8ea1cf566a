"""A random projection of all parameters onto a few numbers, one pass over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equilibrate._engine.sharding import Layout, as_dtensor, local

SIZE = 127
"""Numbers of a sketch. It is prime, so that the columns of a matrix are spread over all of them."""
_PIECE = 8192 * SIZE
"""Elements that are projected at a time, which bounds the memory."""
_SEED = 0x5EED


class Sketch:
    """Projects the parameters of one bucket.

    Element i of a tensor is added to number i mod `SIZE`, with a random sign. The squared length of
    the difference of two sketches is then on average |θ − θ′|², with a relative standard deviation
    of √(2/`SIZE`) if many elements contribute. Signs are generated again for each sketch, by a
    generator of their own, and depend on where a shard lies in its parameter, so that replicas have
    the same and shards independent ones.

    Args:
        params: The parameters.
        first: Number of the first of them among all parameters of the optimizer.
        layout: How the parameters are distributed over processes.
        process_group: The group over which FSDP1 shards the parameters, if it does.
    """

    def __init__(
        self, params: Sequence[Tensor], first: int, layout: Layout, process_group: Any | None
    ) -> None:
        self._params = list(params)
        self._share = [layout.shards(p) / layout.processes for p in params]
        self._seeds = [_seed(first + i, p, process_group) for i, p in enumerate(params)]
        self.device = local(params[0]).device

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return this process's part of the sketch, for `Layout.total`."""
        total = torch.zeros(SIZE, dtype=torch.float64, device=self.device)
        generator = torch.Generator(self.device)
        for p, share, seed in zip(self._params, self._share, self._seeds, strict=True):
            generator.manual_seed(seed)
            for piece in local(p).detach().reshape(-1).split(_PIECE):
                total.add_(_project(piece, generator), alpha=share)
        return total


def placements(params: Sequence[Tensor], layout: Layout) -> list[str]:
    """Return how each parameter is distributed: sketches of other distributions do not compare."""
    found = [f"{layout.processes} processes"]
    for p in params:
        distributed = as_dtensor(p)
        if distributed is None:
            found.append(f"{layout.shards(p)}")
        else:
            found.append(f"{tuple(distributed.device_mesh.shape)} {distributed.placements}")
    return found


def _project(piece: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.randint(
        0, 2, piece.shape, generator=generator, dtype=torch.int8, device=piece.device
    )
    signed = piece.double() * (2 * signs - 1)
    missing = -len(signed) % SIZE
    if missing:
        signed = torch.nn.functional.pad(signed, (0, missing))
    return signed.view(-1, SIZE).sum(0)


def _seed(number: int, param: Tensor, process_group: Any | None) -> int:
    """Return a seed for the shard of a parameter, the same for its replicas."""
    seed = _SEED + number
    distributed = as_dtensor(param)
    if distributed is not None:
        mesh = distributed.device_mesh
        coordinate = mesh.get_coordinate() or [0] * mesh.ndim
        for place, placement, size in zip(
            coordinate, distributed.placements, mesh.shape, strict=True
        ):
            seed = seed * 1_000_003 + (0 if placement.is_replicate() else 1 + place + size)
    elif process_group is not None:
        seed = seed * 1_000_003 + dist.get_rank(process_group)
    return seed % 2**63
