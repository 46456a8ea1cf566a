"""Notice parameters that something other than the optimizer has changed between two steps."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from equilibrate._engine.optimizer.clock import Clock
from equilibrate._engine.sharding import as_dtensor, local

_version = attrgetter("_version")
_borrowed: list[dict[int, int]] = []
"""The version, by identity, that a parameter gets back at the end of each open block."""


def _counted(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors whose versions count changes of the parameters.

    Operations on a DTensor increase its own version, those on its local part only that one's.
    """
    return [*params, *(local(p) for p in params if as_dtensor(p) is not None)]


@contextmanager
def borrowed(params: Sequence[Tensor]) -> Iterator[None]:
    """Change parameters in a block that gives them their values back, without an edit.

    After the block the version counters are what they were, so that intervals that are being
    measured continue. Inside it they show the change to autograd, but not to an `EditWatch`.

    Args:
        params: The parameters.

    Yields:
        None.
    """
    mark = {id(p): _versions([p]) for p in params}
    _borrowed.append(mark)
    try:
        with _unsafe_preserve_version_counter(tuple(_counted(params))):
            yield
    finally:
        _borrowed[:] = [other for other in _borrowed if other is not mark]


def are_borrowed(params: Sequence[Tensor]) -> bool:
    """Return whether any of the parameters has other values for the duration of a block."""
    return any(id(p) in mark for mark in _borrowed for p in params)


def _versions(params: Sequence[Tensor], *, distributed: bool = True) -> int:
    """Return the sum of the versions that parameters have outside blocks of `borrowed`.

    Args:
        params: The parameters.
        distributed: Whether some of them may be DTensors.
    """
    kept = 0
    if _borrowed:
        known = ChainMap(*_borrowed)  # of nested blocks the outermost one counts
        kept = sum(known[id(p)] for p in params if id(p) in known)
        params = [p for p in params if id(p) not in known]
    return kept + sum(map(_version, _counted(params) if distributed else params))


class EditWatch:
    """Compares version counters, which every in-place change of a tensor increases.

    Reading the counters of hundreds of tensors takes longer than all else that a monitor does at a
    step it does not measure. So they are read around measured steps, which tells by how much one
    step of the optimizer increases them; over the steps in between they must have grown by that
    much for each. Only after a first difference are they read around every step, since
    it may also come from an optimizer whose steps are not all alike.

    Args:
        clock: Counts the steps.
        distributed: Whether some of the parameters are DTensors.
    """

    def __init__(self, clock: Clock, *, distributed: bool) -> None:
        self._clock = clock
        self._distributed = distributed
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
        self._before = _versions(params, distributed=self._distributed)
        if self._after is None:
            return False
        unchecked = self._clock.calls - self._calls
        edited = self._before != self._after + unchecked * self._growth
        self.every_step |= edited
        return edited

    def step(self, params: Sequence[Tensor]) -> None:
        """Note a step before which `is_edited` was called."""
        self._after = _versions(params, distributed=self._distributed)
        self._growth = self._after - self._before
        self._calls = self._clock.calls

    def forget(self) -> None:
        """Take the parameters as they are, for example after loading a state."""
        self._after = None
