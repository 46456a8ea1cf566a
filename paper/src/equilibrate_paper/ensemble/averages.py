"""Half-running averages of values that come in epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HalfRunningBlocks:
    """`eq.HalfRunningMean` for values that come in blocks of `size` steps, read between blocks.

    After n blocks the window begins at step ⌊n·size/2⌋, which is where a block begins or ⌊size/2⌋
    steps later. So two sums for each block are enough, and the state stays small.

    Args:
        shape: Shape of one value.
        size: Steps in a block, for example in an epoch.

    Example:
        >>> mean = HalfRunningBlocks(size=3)
        >>> mean.extend(torch.tensor([9.0, 1.0, 2.0]))
        >>> mean.count, mean.window, float(mean.value)
        (3, 2, 1.5)
    """

    def __init__(self, shape: Sequence[int] = (), *, size: int) -> None:
        self.shape = tuple(shape)
        self.size = size
        self.reset()

    @property
    def count(self) -> int:
        """Number of values since the last reset, t."""
        return self._blocks * self.size

    @property
    def window(self) -> int:
        """Number of values in the average, t − ⌊t/2⌋."""
        return self.count - self.count // 2

    @property
    def value(self) -> Tensor:
        """Ō(t), on the host; nan before the first block."""
        if not self._blocks:
            return torch.full(self.shape, torch.nan, dtype=torch.float64, device="cpu")
        part = self._blocks % 2  # if odd, only the later half of the oldest block counts
        return (self._sums[0, part] + self._sums[1:, 0].sum(0)) / self.window

    def extend(self, values: Tensor) -> None:
        """Add one block of `size` values, stacked along the first axis."""
        values = values.to("cpu", torch.float64)
        sums = torch.stack([values.sum(0), values[self.size // 2 :].sum(0)])
        self._blocks += 1
        kept = self._blocks - self._blocks // 2
        self._sums = torch.cat([self._sums, sums[None]])[-kept:]

    def reset(self) -> None:
        """Remove all values."""
        self._blocks = 0
        self._sums = torch.empty((0, 2, *self.shape), dtype=torch.float64, device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which `load_state_dict` continues bit by bit."""
        return {"blocks": self._blocks, "sums": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._blocks = int(state["blocks"])
        self._sums = state["sums"].to("cpu", copy=True)
