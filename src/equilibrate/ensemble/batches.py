"""Data sets on the device, and the mini-batches of an epoch gathered there one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equilibrate.ensemble._ops import PackedImages
from equilibrate.ensemble.sampling import Sampling, draw

DataSet = Tensor | PackedImages
"""Images (N, …), perhaps in a layout that the first layer reads faster."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Images by their place in a data set: replica r has images[index[r]]."""

    images: DataSet
    """(N, …)."""
    index: Tensor
    """(R, B)."""

    def gathered(self) -> Tensor:
        """(R, B, …)."""
        images = self.images.images if isinstance(self.images, PackedImages) else self.images
        return images.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)


class DataSets:
    """Images as `prepare` makes them, on the device; the last few that lie there are kept.

    They are known again by their tensor, unless torch has written to it since; inference tensors
    do not tell that, and are prepared each time.

    >>> sets = DataSets(lambda images: 2 * images, torch.device("cpu"))
    >>> images = torch.ones(2, 3)
    >>> sets.of(images) is sets.of(images)
    True
    """

    def __init__(self, prepare: Callable[[Tensor], DataSet], device: torch.device) -> None:
        self._prepare, self._device = prepare, device
        self._kept: deque[tuple[Tensor, int, DataSet]] = deque(maxlen=3)

    def of(self, images: Tensor) -> DataSet:
        """These images, prepared."""
        there = images.to(self._device)
        for known, version, prepared in self._kept:
            if known is there and version == there._version:
                return prepared
        prepared = self._prepare(there)
        # What has just been sent is known to no one, and what needs no preparing is at hand.
        if there is images and prepared is not there and not there.is_inference():
            self._kept.append((there, there._version, prepared))
        return prepared


class Orders:
    """The examples of each step of an epoch, (steps, R, B), as `Batches.start` takes them.

    They come from (seed, epoch) alone; the last drawn are kept, so that those of the next epoch
    can be drawn while a device is at work.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        examples: int,
        batch_size: int,
        sampling: Sampling,
        staged: Callable[[Tensor], Tensor],
    ) -> None:
        self._seeds, self._staged = seeds, staged
        self._settings = examples, batch_size, sampling
        self._last = -1, torch.empty(0)

    def of(self, epoch: int) -> Tensor:
        """Those of this epoch."""
        if self._last[0] != epoch:
            orders = [draw(seed, epoch, *self._settings) for seed in self._seeds]
            self._last = epoch, self._staged(torch.from_numpy(np.stack(orders, axis=1)))
        return self._last[1]


class Batches:
    """Hands out the examples that `order` (steps, R, B) names, one batch of each replica a time.

    All tensors are static, as a CUDA graph wants them; whoever has used a batch adds one to
    `counts`, which holds how many each replica has had. With `gathers` the images are left where
    they are, packed or not, for the first layer to find. `fused`: through a Triton kernel.

    >>> batches = Batches(torch.eye(3), torch.arange(3), (2, 1, 1))
    >>> batches.start(torch.tensor([[[2]], [[0]]]))
    >>> batches.take()
    (tensor([[[0., 0., 1.]]]), tensor([[2]]))
    """

    def __init__(
        self,
        images: DataSet,
        labels: Tensor,
        shape: tuple[int, int, int],
        *,
        gathers: bool = False,
        fused: bool = False,
    ) -> None:
        self._images = images
        self._labels = labels.contiguous() if fused else labels
        self._gathers, self._fused = gathers, fused
        # half as much to send to a GPU
        dtype = torch.int32 if fused else torch.int64
        self._order = torch.zeros(shape, dtype=dtype, device=labels.device)
        self.counts = torch.zeros(shape[1], dtype=torch.int64, device=labels.device)
        if fused:
            self._index = torch.zeros(shape[1:], dtype=torch.int64, device=labels.device)
            self._y = labels.new_empty((*shape[1:], *labels.shape[1:]))
        self._gathered = None
        if fused and not gathers:
            assert isinstance(images, Tensor)
            x = images.new_empty((*shape[1:], *images.shape[1:]))
            self._gathered = images.contiguous(), x

    def staged(self, order: Tensor) -> Tensor:
        """An order on the host, as `start` takes it without waiting."""
        order = order.to(self._order.dtype)
        return order.pin_memory() if self._order.is_cuda else order

    def start(self, order: Tensor) -> None:
        """Begin an epoch."""
        self._order.copy_(order, non_blocking=True)
        self.counts.zero_()

    def take(self) -> tuple[Tensor | Examples, Tensor]:
        """The images and labels of the next batch."""
        if not self._fused:
            index = self._order.index_select(0, self.counts[:1])[0]
            examples = Examples(self._images, index)
            x = examples if self._gathers else examples.gathered()
            return x, Examples(self._labels, index).gathered()
        from equilibrate.ensemble._ops import step as fused

        labels = self._labels, self._y
        if self._gathered is None:
            fused.take(self._order, self.counts, labels, self._index)
            return Examples(self._images, self._index), self._y
        fused.take(self._order, self.counts, labels, self._index, self._gathered)
        return self._gathered[1], self._y
