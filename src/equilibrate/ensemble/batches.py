"""The mini-batches of an epoch, gathered one after the other on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Examples:
    """Images by their place in a data set: replica r has images[index[r]]."""

    images: Tensor
    """(N, …)."""
    index: Tensor
    """(R, B)."""

    def gathered(self) -> Tensor:
        """(R, B, …)."""
        return self.images.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)


class Batches:
    """Hands out the examples that `order` (steps, R, B) names, one batch of each replica a time.

    All tensors are static, as a CUDA graph wants them; whoever has used a batch adds one to
    `counts`, which holds how many each replica has had. With `gathers` the images are left where
    they are, for the first layer to find. `fused`: through a Triton kernel.

    >>> batches = Batches(torch.eye(3), torch.arange(3), (2, 1, 1))
    >>> batches.start(torch.tensor([[[2]], [[0]]]))
    >>> batches.take()
    (tensor([[[0., 0., 1.]]]), tensor([[2]]))
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        shape: tuple[int, int, int],
        *,
        gathers: bool = False,
        fused: bool = False,
    ) -> None:
        self._images = images.contiguous() if fused else images
        self._labels = labels.contiguous() if fused else labels
        self._gathers, self._fused = gathers, fused
        # half as much to send to a GPU
        dtype = torch.int32 if fused else torch.int64
        self._order = torch.zeros(shape, dtype=dtype, device=images.device)
        self.counts = torch.zeros(shape[1], dtype=torch.int64, device=images.device)
        if fused:
            self._index = torch.zeros(shape[1:], dtype=torch.int64, device=images.device)
            self._y = labels.new_empty((*shape[1:], *labels.shape[1:]))
            self._x = None if gathers else images.new_empty((*shape[1:], *images.shape[1:]))

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
        from equilibrate.ensemble import fused

        data, batch = (self._images, self._labels), (self._index, self._x, self._y)
        fused.take(self._order, self.counts, data, batch)
        return Examples(self._images, self._index) if self._x is None else self._x, self._y
