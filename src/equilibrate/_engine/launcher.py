"""Launch a Triton kernel again and again with little work for the host."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction


class Launcher:
    """Launches one kernel on a one-dimensional grid, on the device of its tensors.

    Triton finds the compiled kernel by the types, alignments and constants of all arguments, which
    takes the host longer than the launch itself. Here it is found once for each key that a caller
    can change: what the constants are, and how tensors are aligned. Tensors are then passed as
    addresses.

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
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> None:
        """Launch the kernel with all its arguments in order, constants included."""
        if not self._compiles:
            self._kernel[self._grid](*arguments)
        elif torch.cuda.current_device() == self._device.index:
            self._launch(arguments)
        else:
            with torch.cuda.device(self._device):
                self._launch(arguments)

    def _launch(self, arguments: tuple[Any, ...]) -> None:
        plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        # Numbers that are neither addresses nor constants are floats, whose values do not matter.
        key = tuple(
            (a % 16 == 0) if isinstance(given, Tensor) else None if type(a) is float else a
            for a, given in zip(plain, arguments, strict=True)
        )
        runner = self._compiled.get(key)
        if runner is None:
            compiled = self._kernel[self._grid](*arguments)
            self._compiled[key] = compiled[self._grid]
        else:
            runner(*plain)
