"""Other values for the parameters and buffers of a model, for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from equilibrate._engine.sharding import local


@contextmanager
def exchanged(params: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Give tensors other values for the duration of a block, and their own ones after it.

    Args:
        params: The tensors, such as parameters.
        values: Tensors that are distributed as these are, of any floating-point dtype.

    Yields:
        None.
    """
    own = [local(p).detach().clone() for p in params]
    try:
        _copy(params, values)
        yield
    finally:
        _copy(params, own)


def _copy(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            local(p).copy_(local(value))
