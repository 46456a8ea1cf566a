"""Call the training step of a trainer once more, and leave no trace of it."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equilibrate.watching.sharding import local

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)
_LARGE = 1000
"""Length up to which the contents of a container are looked into."""


class Bystanders:
    """The parameters of a model that an optimizer does not have.

    Most are frozen, and a copy of them may not fit into memory. But a training step may itself move
    some, such as a second network that follows the first, and these must be copied. Quantized ones
    are taken for frozen.

    Args:
        params: The parameters of the model.
        own: Those of the optimizer.
    """

    def __init__(self, params: Iterable[Tensor], own: Iterable[Tensor]) -> None:
        trained = {id(p) for p in own}
        self._params = [p for p in params if id(p) not in trained and _is_plain(p)]
        self._norms = self._measure()

    def moving(self) -> list[Tensor]:
        """Return those that are not what they were at first. It waits for the device."""
        pairs = zip(self._params, self._norms, self._measure(), strict=True)
        return [p for p, first, now in pairs if not torch.equal(first, now)]

    def _measure(self) -> list[Tensor]:
        return [local(p).detach().float().norm() for p in self._params]


def _is_plain(param: Tensor) -> bool:
    return type(local(param)) in (Tensor, nn.Parameter) and param.is_floating_point()


@contextmanager
def without_trace(objects: Iterable[Any], params: Iterable[Tensor] = ()) -> Iterator[None]:
    """Undo what a block does to the attributes of objects.

    Attributes get their values back, and so do tensors, lists, dictionaries and generators in them:
    counters, metrics, and methods that were replaced for the block. Parameters and buffers of
    modules are left alone, and so are global random generators.

    Args:
        objects: The objects.
        params: Parameters that are restored.

    Yields:
        None.
    """
    objects = list(objects)
    undo: list[Callable[[], object]] = [partial(_restore, p, p.detach().clone()) for p in params]
    seen = {id(o._buffers) for o in objects if isinstance(o, nn.Module)}
    for each in objects:
        _note(vars(each), undo, seen)
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _note(value: Any, undo: list[Callable[[], object]], seen: set[int]) -> None:
    """Note how to give a tensor, a generator or a container its present contents back.

    Args:
        value: Anything.
        undo: Functions to which those that do it are added.
        seen: Identities of values that need nothing more.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and not value.is_inference():
            undo.append(partial(_restore, value, value.detach().clone(), value._version))
    elif isinstance(value, torch.Generator):
        undo.append(partial(value.set_state, value.get_state()))
    elif isinstance(value, np.random.Generator):
        generator = value.bit_generator
        undo.append(partial(setattr, generator, "state", generator.state))
    elif type(value) in _MAPPINGS:
        undo.append(partial(_refill_mapping, value, dict(value)))
        parts = list(value.values())
    elif type(value) in _SEQUENCES:
        parts = list(value)
        undo.append(partial(_refill_sequence, value, parts))
    if len(parts) <= _LARGE:
        for part in parts:
            _note(part, undo, seen)


@torch.no_grad()
def _restore(tensor: Tensor, contents: Tensor, version: int | None = None) -> None:
    if tensor._version != version:
        tensor.copy_(contents)


def _refill_mapping(mapping: dict[Any, Any], contents: dict[Any, Any]) -> None:
    for key in mapping.keys() - contents.keys():
        del mapping[key]
    for key, value in contents.items():
        if key not in mapping or mapping[key] is not value:
            mapping[key] = value


def _refill_sequence(sequence: Any, contents: list[Any]) -> None:
    if len(sequence) != len(contents) or any(map(is_not, sequence, contents)):
        sequence.clear()
        sequence.extend(contents)
