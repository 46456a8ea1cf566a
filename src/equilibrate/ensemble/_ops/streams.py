"""A second CUDA stream beside the main one, for what nothing on it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SecondStream:
    """One more stream on each device; elsewhere than on a GPU all stays in one line.

    Two kernels side by side fill what each would leave idle. What is read and written beside must
    be kept until `join`, and memory taken before, on the main stream: then its allocator need not
    know of this one.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Launch here, after what is queued on the main stream so far."""
        if device.type != "cuda":
            yield
            return
        stream = self._on(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    def join(self, device: torch.device) -> None:
        """Let the main stream wait for what was launched here."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_stream(self._on(device))

    def _on(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
