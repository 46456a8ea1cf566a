"""Launch a Triton kernel again and again with little work for the host."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction


class Launcher:
    """Launches one kernel on a one-dimensional grid, on the device of its tensors.

    Triton finds the compiled kernel by the types, alignments and constants of all arguments, which
    takes the host longer than the launch itself. Here it is found once for each key, and tensors
    are then passed as addresses.

    Args:
        kernel: A function decorated with `triton.jit`.
        programs: Size of the grid.
        device: Device of the tensors.
    """

    def __init__(self, kernel: Any, programs: int, device: torch.device) -> None:
        self._kernel = kernel
        self._grid = (programs, 1, 1)
        self._device = device
        self._compiles = isinstance(kernel, JITFunction)  # and is not interpreted
        self._runners: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, *arguments: Any) -> None:
        """Launch the kernel.

        Args:
            key: What differs between calls that need different code: constants, types, and whether
                tensors are aligned to 16 bytes.
            arguments: All arguments in order, constants included. Numbers that are not constants
                must be floats.
        """
        if not self._compiles:
            self._kernel[self._grid](*arguments)
        elif torch.cuda.current_device() == self._device.index:
            self._launch(key, arguments)
        else:
            with torch.cuda.device(self._device):
                self._launch(key, arguments)

    def _launch(self, key: Hashable, arguments: tuple[Any, ...]) -> None:
        runner = self._runners.get(key)
        if runner is None:
            self._runners[key] = self._kernel[self._grid](*arguments)[self._grid]
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        runner(*plain, stream=stream)
