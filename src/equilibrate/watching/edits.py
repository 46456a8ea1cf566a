"""Notice parameters that something other than the optimizer has changed between two steps."""

from __future__ import annotations

import random
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from equilibrate.watching.sharding import as_dtensor, local

_version = attrgetter("_version")
_borrowed: list[dict[int, int]] = []
"""The version, by identity, that a parameter gets back at the end of each open block."""


@contextmanager
def exchanged(params: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Give parameters other values for the duration of a block, and their own ones after it.

    After the block the version counters are what they were, so that intervals that are being
    measured continue. Inside it they show the change to autograd, but not to an `EditWatch`.

    Args:
        params: The parameters.
        values: Tensors that are distributed as these are, of any floating-point dtype.

    Yields:
        None.
    """
    own = [local(p).detach().clone() for p in params]
    mark = {id(p): _versions([p]) for p in params}
    _borrowed.append(mark)
    try:
        with _unsafe_preserve_version_counter(tuple(_counted(params))):
            try:
                _copy(params, values)
                yield
            finally:
                _copy(params, own)
    finally:
        _borrowed[:] = [other for other in _borrowed if other is not mark]


@contextmanager
def kept_buffers(model: nn.Module | None) -> Iterator[None]:
    """Give the buffers of a model their values back after a block, whatever happens to them in it.

    Args:
        model: The model; None if there is nothing to do.

    Yields:
        None.
    """
    modules = [] if model is None else list(model.modules())
    before = [
        (module._buffers, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, value in before:
            buffers[name] = buffer
            if 0 not in buffer.stride():  # an expanded view cannot be written to
                buffer.copy_(value)


@contextmanager
def kept_generators(params: Iterable[Tensor]) -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch after a block.

    Args:
        params: Parameters, on whose devices generators are restored, too.

    Yields:
        None.
    """
    devices = {p.device for p in params if p.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(list(devices), device_type=kind):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def are_exchanged(params: Sequence[Tensor]) -> bool:
    """Return whether any of the parameters has other values for the duration of a block."""
    return any(id(p) in mark for mark in _borrowed for p in params)


class EditWatch:
    """Compares version counters, which every in-place change of a tensor increases.

    Reading the counters of hundreds of tensors takes longer than all else that a monitor does at a
    step it does not measure. So they are read around measured steps, which tells by how much one
    step of the optimizer increases them; over the steps in between they must have grown by that
    much for each. Only after a first difference are they read around every step, since it may also
    come from an optimizer whose steps are not all alike, or from tensors without gradients.

    Args:
        distributed: Whether some of the tensors are DTensors.
    """

    def __init__(self, *, distributed: bool) -> None:
        self._distributed = distributed
        self.every_step = False
        """Whether the counters must be read around every step."""
        self.forget()

    def check_edits(self, tensors: Sequence[Tensor], step: int) -> bool:
        """Return whether tensors were changed since the last step, and remember them as they are.

        Args:
            tensors: Parameters, and the state of the optimizer that matters.
            step: Number of steps so far. The next one must be told to `note_step`.
        """
        places = self._places_of(tensors)
        versions, before = _versions(tensors, distributed=self._distributed), self._after
        moved = self._places not in (None, places)
        self._before, self._places = versions, places
        steps = step - self._step
        if before is None or (steps and self._growth is None):
            return moved
        edited = moved or versions != before + steps * (self._growth or 0)
        self.every_step |= edited
        return edited

    def note_step(self, tensors: Sequence[Tensor], step: int) -> None:
        """Note a step before which `check_edits` was called; `step` counts it."""
        self._after, self._step = _versions(tensors, distributed=self._distributed), step
        if self._places is not None and len(tensors) == len(self._places):
            self._growth = self._after - self._before
        else:  # buffers were created
            self._places, self._growth = self._places_of(tensors), None

    def forget(self) -> None:
        """Take the parameters as they are, for example after loading a state."""
        self._before, self._step = 0, 0
        self._growth: int | None = None
        self._after: int | None = None
        self._places: list[int] | None = None

    def _places_of(self, tensors: Sequence[Tensor]) -> list[int]:
        return list(map(Tensor.data_ptr, map(local, tensors) if self._distributed else tensors))

    @property
    def is_lost(self) -> bool:
        """Whether it is not known by how much a step increases the counters."""
        return self._growth is None


def _counted(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors whose versions count changes of the parameters.

    Operations on a DTensor increase its own version, those on its local part only that one's.
    """
    return [*params, *(local(p) for p in params if as_dtensor(p) is not None)]


def _versions(params: Sequence[Tensor], *, distributed: bool = True) -> int:
    """Return the sum of the versions that parameters have outside blocks of `exchanged`."""
    kept = 0
    if _borrowed:
        known = ChainMap(*_borrowed)  # of nested blocks the outermost one counts
        kept = sum(known[id(p)] for p in params if id(p) in known)
        params = [p for p in params if id(p) not in known]
    return kept + sum(map(_version, _counted(params) if distributed else params))


def _copy(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch.clear_autocast_cache()  # a block of autocast may hold copies of the parameters
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            local(p).copy_(local(value))
