"""Notice parameters that something other than the optimizer has changed between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from equilibrate._engine.optimizer.clock import Clock

_version = attrgetter("_version")


class EditWatch:
    """Compares version counters, which every in-place change of a tensor increases.

    Reading the counters of hundreds of tensors takes longer than all else that a monitor does at a
    step it does not measure. So they are read around measured steps, which tells by how much one
    step of the optimizer increases them; over the steps in between they must have grown by that
    much for each. Only after a first difference are they read around every step, since
    it may also come from an optimizer whose steps are not all alike.

    Args:
        clock: Counts the steps.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.every_step = False
        """Whether the counters must be read around every step."""
        self._before = 0
        self._after: int | None = None
        self._growth = 0
        self._calls = 0

    @property
    def is_lost(self) -> bool:
        """Whether there is nothing to compare the counters with."""
        return self._after is None

    def is_edited(self, params: Sequence[Tensor]) -> bool:
        """Return whether the parameters were changed since the last step; call it before one."""
        self._before = sum(map(_version, params))
        if self._after is None:
            return False
        unchecked = self._clock.calls - self._calls
        edited = self._before != self._after + unchecked * self._growth
        self.every_step |= edited
        return edited

    def step(self, params: Sequence[Tensor]) -> None:
        """Note a step before which `is_edited` was called."""
        self._after = sum(map(_version, params))
        self._growth = self._after - self._before
        self._calls = self._clock.calls

    def forget(self) -> None:
        """Take the parameters as they are, for example after loading a state."""
        self._after = None
