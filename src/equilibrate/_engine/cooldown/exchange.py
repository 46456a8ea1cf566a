"""Other values for the parameters of a model, for a while, and its buffers back after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equilibrate._engine.optimizer.edits import borrowed
from equilibrate._engine.sharding import local


@contextmanager
def exchanged(params: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Give parameters other values for the duration of a block, and their own ones after it.

    Args:
        params: The parameters.
        values: Tensors that are distributed as these are, of any floating-point dtype.

    Yields:
        None.
    """
    own = [local(p).detach().clone() for p in params]
    with borrowed(params):
        try:
            _copy(params, values)
            yield
        finally:
            _copy(params, own)


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
            if not torch.equal(buffer, value):  # one that is an expanded view cannot be written to
                buffer.copy_(value)


def _copy(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            local(p).copy_(local(value))
