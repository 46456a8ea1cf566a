"""Running averages of observables: update, value, reset, state_dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_FIRST_CAPACITY = 1024


class HalfRunningMean:
    """The paper's half-running average, exact at every t (its equation for Ō(t), section 3).

    Ō(t) = 1/(t − t₀) Σ_{t′=t₀+1}^{t} O(t′) with t₀ = ⌊t/2⌋: the first half is left out as
    transient. The values of the later half are stored in float64, 8 bytes for each number and
    step. An update is one copy on the device of the value and does not wait for it.

    Args:
        shape: Shape of one value.
        device: Device of the values.

    Example:
        >>> mean = HalfRunningMean()
        >>> for x in [9.0, 1.0, 2.0]:
        ...     mean.update(torch.tensor(x))
        >>> mean.count, mean.window, float(mean.value)
        (3, 2, 1.5)
    """

    def __init__(
        self, shape: Sequence[int] = (), *, device: torch.device | str | None = None
    ) -> None:
        self.shape = tuple(shape)
        self._rows = torch.empty((0, *self.shape), dtype=torch.float64, device=device)
        self.reset()

    @property
    def count(self) -> int:
        """Number of values since the last reset, t."""
        return self._count

    @property
    def window(self) -> int:
        """Number of values in the average, t − ⌊t/2⌋."""
        return self._count - self._count // 2

    @property
    def value(self) -> Tensor:
        """Ō(t), on the device of the values; nan before the first value."""
        return self._live()[-self.window :].mean(0) if self._count else self._nan()

    def update(self, value: Tensor) -> None:
        """Add the value O(t) of one step."""
        self._reserve(1)
        self._rows[self._end].copy_(value)
        self._end += 1
        self._count += 1

    def extend(self, values: Tensor) -> None:
        """Add the values of several steps, stacked along the first axis."""
        steps = len(values)
        self._reserve(steps)
        self._rows[self._end : self._end + steps].copy_(values)
        self._end += steps
        self._count += steps

    def reset(self) -> None:
        """Remove all values."""
        self._count = 0
        self._end = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which `load_state_dict` continues bit by bit."""
        return {"count": self._count, "rows": self._live()[-self.window :].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            ValueError: If its values have another shape.
        """
        rows = state["rows"]
        if tuple(rows.shape[1:]) != self.shape:
            raise ValueError(
                f"state holds values of shape {tuple(rows.shape[1:])}, this average has "
                f"{self.shape}: load the state of the same model, with the same settings"
            )
        self.reset()
        self.extend(rows)
        self._count = int(state["count"])

    def _live(self) -> Tensor:
        return self._rows[: self._end]

    def _nan(self) -> Tensor:
        return torch.full(self.shape, torch.nan, dtype=torch.float64, device=self._rows.device)

    def _reserve(self, steps: int) -> None:
        """Make room for more rows, without those that no later window can reach."""
        if self._end + steps <= len(self._rows):
            return
        kept = self._live()[self._end - self.window :]
        capacity = max(_FIRST_CAPACITY, 2 * (len(kept) + steps))
        rows = self._rows.new_empty((capacity, *self.shape))
        rows[: len(kept)] = kept
        self._rows, self._end = rows, len(kept)


class HalfRunningBlocks:
    """`HalfRunningMean` for values that come in blocks of `size` steps, read between blocks.

    After n blocks the window begins at step ⌊n·size/2⌋, which is where a block begins or ⌊size/2⌋
    steps later. So two sums for each block are enough, and the state stays small.

    Args:
        shape: Shape of one value.
        size: Steps in a block, for example in an epoch.

    Raises:
        ValueError: If `size` is below 1.

    Example:
        >>> mean = HalfRunningBlocks(size=3)
        >>> mean.extend(torch.tensor([9.0, 1.0, 2.0]))
        >>> mean.count, mean.window, float(mean.value)
        (3, 2, 1.5)
    """

    def __init__(self, shape: Sequence[int] = (), *, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, the steps of a block, got {size}")
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
        """Add one block of values, stacked along the first axis.

        Raises:
            ValueError: If there are not `size` values of the right shape.
        """
        if values.shape != (self.size, *self.shape):
            raise ValueError(
                f"values must be one block of shape {(self.size, *self.shape)}, got "
                f"{tuple(values.shape)}"
            )
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
        return {"size": self.size, "blocks": self._blocks, "sums": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            ValueError: If its blocks have another shape.
        """
        mine, other = (self.size, *self.shape), (state["size"], *state["sums"].shape[2:])
        if mine != other:
            raise ValueError(
                f"state holds blocks of shape {other}, this average has {mine}: load the state of "
                "the same model, with the same settings"
            )
        self._blocks = int(state["blocks"])
        self._sums = state["sums"].to("cpu", copy=True)
