"""A second CUDA stream for kernels that nothing on the main stream waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """One additional CUDA stream for each device. On other devices it does nothing.

    Two kernels that run concurrently use what each alone would leave idle. Tensors that are read or
    written on the side stream must be kept alive until `join`, and must be allocated on the main
    stream: then the memory allocator need not know about the side stream.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        """Launch kernels on the side stream, after those queued on the main stream so far.

        Args:
            device: The device of the kernels.

        Yields:
            Nothing.
        """
        if device.type != "cuda":
            yield
            return
        stream = self._on(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    def join(self, device: torch.device) -> None:
        """Make the main stream wait for the kernels launched on the side stream.

        Args:
            device: The device of the kernels.
        """
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_stream(self._on(device))

    def _on(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
