"""Inner products of parameter-sized tensors, whatever their layout, without waiting for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import torch
from torch import Tensor

# A single-precision dot product loses digits as it grows (3e-5 at two million terms on a CPU).
_LONGEST = 1 << 18
# Short enough that what one product has read is still in the core's cache for the next.
_PIECE = 1 << 16


def products(params: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
    """θ·z and z² for each tensor in turn, in one row of single or double precision.

    >>> products([torch.tensor([[1.0, 2.0]])], [torch.tensor([[3.0, 4.0]])])
    tensor([11., 25.])
    """
    cells: list[Tensor] = []
    for p, z in zip(params, vectors, strict=True):
        theta, vector = flatten(p, z)
        if _is_exact(theta, vector):
            cells += (torch.dot(theta, vector), torch.dot(vector, vector))
        else:
            pieces = [d for x, y in _pieces(theta, vector) for d in (x.dot(y), y.dot(y))]
            cells += torch.stack(pieces).view(-1, 2).sum(0).unbind(0)
    return torch.stack(cells)


def gram(*lists: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """a·a, a·b, …, b·b, … for each tensor of the lists a, b, …, in double precision.

    >>> aa, ab, bb = gram([torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0])])
    >>> ab
    tensor([11.], dtype=torch.float64)
    """
    pairs = list(combinations_with_replacement(range(len(lists)), 2))
    cells = [_dot(each[i], each[j]) for each in zip(*lists, strict=True) for i, j in pairs]
    return torch.stack(cells).double().view(-1, len(pairs)).unbind(1)


def flatten(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """One-dimensional views with one order of elements.

    Beside a sparse `b`, `a` is restricted to what it touches, which leaves their product unchanged.
    """
    if b.is_sparse:
        sparse = b.coalesce()
        return a.sparse_mask(sparse).values().reshape(-1), sparse.values().reshape(-1)
    if a.is_contiguous() and b.is_contiguous():
        return (a, b) if a.dim() == 1 else (a.view(-1), b.view(-1))
    order = sorted(range(a.dim()), key=a.stride, reverse=True)  # a view for channels_last, say
    return a.permute(order).reshape(-1), b.permute(order).reshape(-1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    a, b = flatten(a, b)
    if _is_exact(a, b):
        return torch.dot(a, b)
    return torch.stack([x.dot(y) for x, y in _pieces(a, b)]).sum()


def _is_exact(a: Tensor, b: Tensor) -> bool:
    """Whether `torch.dot` takes the two and keeps the digits of single precision."""
    dtype = a.dtype
    if dtype is not b.dtype:
        return False
    if dtype is torch.float32:
        return a.numel() <= _LONGEST or a.is_cuda
    return dtype is torch.float64


def _pieces(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    split = zip(a.split(_PIECE), b.split(_PIECE), strict=True)
    return [(x.float(), y.float()) for x, y in split]
