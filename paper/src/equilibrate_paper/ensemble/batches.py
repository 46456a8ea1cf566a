"""Mini-batches of an epoch, and chunks of a whole data set, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from equilibrate_paper.ensemble._ops.protocol import Ops
from equilibrate_paper.ensemble.examples import IndexedInputs, PreparedInputs
from equilibrate_paper.ensemble.sampling import Sampling, draw

_CHUNK_ON_CPU = 1_000
_CHUNK_ON_GPU = 2_000
"""Enough to keep it busy. The outputs of all layers of 16 CNNs then take 8 GB."""


class BatchOrders:
    """The example indices of each epoch, (steps, R, B).

    They depend on (seed, epoch) alone. The last ones drawn are kept, so that the indices of the
    next epoch can be drawn while the device is busy.

    Args:
        seeds: The seed of each replica.
        examples: Number of examples in the data set.
        batch_size: Examples in a mini-batch.
        sampling: How mini-batches are sampled.
        prepare: Converts indices into what `Batches.start` takes.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        examples: int,
        batch_size: int,
        sampling: Sampling,
        prepare: Callable[[Tensor], Tensor],
    ) -> None:
        self._seeds, self._prepare = seeds, prepare
        self._settings = examples, batch_size, sampling
        self._last = -1, torch.empty(0)

    def get(self, epoch: int) -> Tensor:
        """Draw the indices of one epoch, or return them if they were drawn last.

        Args:
            epoch: The epoch, starting at 0.

        Returns:
            Indices (steps, R, B), ready for `Batches.start`.
        """
        if self._last[0] != epoch:
            orders = [draw(seed, epoch, *self._settings) for seed in self._seeds]
            self._last = epoch, self._prepare(torch.from_numpy(np.stack(orders, axis=1)))
        return self._last[1]


class Batches:
    """Read one mini-batch of each replica at a time, in a given order.

    All tensors are static, as CUDA graphs require. `counts` holds the number of mini-batches that
    each replica has used in this epoch; the caller adds one after using a mini-batch.

    Args:
        inputs: The prepared inputs of the data set, (N, …).
        targets: The targets of the data set, (N, …).
        shape: Steps of an epoch, replicas, and examples in a mini-batch: (steps, R, B).
        ops: The operations to use.
        as_indices: Leave the inputs in place and return their indices.

    Example:
        >>> from equilibrate_paper.ensemble._ops.plain import PlainOps
        >>> batches = Batches(torch.eye(3), torch.arange(3), (2, 1, 1), ops=PlainOps())
        >>> batches.start(torch.tensor([[[2]], [[0]]]))
        >>> batches.take()
        (tensor([[[0., 0., 1.]]]), tensor([[2]]))
    """

    def __init__(
        self,
        inputs: PreparedInputs,
        targets: Tensor,
        shape: tuple[int, int, int],
        *,
        ops: Ops,
        as_indices: bool = False,
    ) -> None:
        self._order = torch.zeros(shape, dtype=ops.order_dtype, device=targets.device)
        self.counts = torch.zeros(shape[1], dtype=torch.int64, device=targets.device)
        self._read = ops.batch_reader(inputs, targets, shape[1:], as_indices=as_indices)

    def prepare_order(self, order: Tensor) -> Tensor:
        """Convert indices on the host so that `start` can copy them without waiting.

        Args:
            order: Indices (steps, R, B) on the host.

        Returns:
            The indices in the data type of the device, in pinned memory for a GPU.
        """
        order = order.to(self._order.dtype)
        return order.pin_memory() if self._order.is_cuda else order

    def start(self, order: Tensor) -> None:
        """Start an epoch.

        Args:
            order: Indices (steps, R, B) of the examples of each mini-batch.
        """
        self._order.copy_(order, non_blocking=True)
        self.counts.zero_()

    def take(self) -> tuple[Tensor | IndexedInputs, Tensor]:
        """Read the mini-batch that `counts` points to.

        Returns:
            Inputs and targets of each replica, (R, B, …).
        """
        return self._read(self._order, self.counts)


def in_chunks(
    data: PreparedInputs, targets: Tensor, replicas: int, *, as_indices: bool
) -> Iterator[tuple[Tensor | IndexedInputs, Tensor]]:
    """Iterate over a data set in chunks, the same for all replicas and without copies.

    Args:
        data: The prepared inputs, (N, …).
        targets: The targets, (N,).
        replicas: Number of replicas, R.
        as_indices: Return the inputs as indices into `data`.

    Yields:
        Inputs and targets of a chunk, (R, B, …).
    """
    size = _CHUNK_ON_CPU if targets.device.type == "cpu" else _CHUNK_ON_GPU
    for start, y in zip(range(0, len(targets), size), targets.split(size), strict=True):
        if as_indices:
            places = torch.arange(start, start + len(y), device=y.device)
            x = IndexedInputs(data, places.expand(replicas, -1))
        else:
            inputs = cast(Tensor, data)[start : start + size]
            x = inputs.expand(replicas, *inputs.shape)
        yield x, y.expand(replicas, *y.shape)
