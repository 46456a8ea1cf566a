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
