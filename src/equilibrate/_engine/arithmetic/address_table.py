"""A table of addresses that a kernel reads directly from the memory of the host."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 256
"""Addresses change only if gradients are computed again, for which an eager step launches several
kernels. About a thousand can be queued, so no row is overwritten before it was read."""


class AddressTable:
    """The addresses of some tensors, in pinned memory of the host.

    Gradients move at most steps. Copying a table to the device would cost two calls for each, so
    the kernel reads it where it is.

    Args:
        size: Number of addresses.
        device: The device that reads the table.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        width = size + size % 2  # each row aligned to 16 bytes
        pinned = device.type == "cuda"
        rows = torch.zeros(_ROWS, width, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._rows = rows.unbind(0)
        self._arrays = list(rows.numpy())
        self._size = size
        self._next = 0
        self._last: list[int] | None = None

    def put(self, addresses: list[int]) -> Tensor:
        """Return a row that holds the addresses: the last one if they are the same."""
        if addresses != self._last:
            self._next = (self._next + 1) % _ROWS
            self._arrays[self._next][: self._size] = addresses
            self._last = addresses
        return self._rows[self._next]
