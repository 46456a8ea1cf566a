"""Inner products of parameter-sized tensors, whatever their layout, without waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement

import torch
from torch import Tensor

# A single-precision dot product loses digits as it grows (3e-5 at two million terms on a CPU).
_LONGEST = 1 << 18
# Short enough that what one product has read is still in the core's cache for the next.
_PIECE = 1 << 16


def products(params: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
    """Return θ·z and z² for each tensor in turn, in one row of single or double precision.

    >>> products([torch.tensor([[1.0, 2.0]])], [torch.tensor([[3.0, 4.0]])])
    tensor([11., 25.])
    """
    cells: list[Tensor] = []
    for p, z in zip(params, vectors, strict=True):
        theta, vector = flatten(p, z)
        if _is_exact(theta, vector):
            cells += (theta.dot(vector), vector.dot(vector))
        else:
            cells += _in_pieces(lambda x, y: (x.dot(y), y.dot(y)), theta, vector)
    return torch.stack(cells)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b in single or double precision; b may be sparse.

    >>> dot(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor(11.)
    """
    x, y = flatten(a, b)
    if _is_exact(x, y):
        return x.dot(y)
    (total,) = _in_pieces(lambda x, y: (x.dot(y),), x, y)
    return total


def gram(*lists: Sequence[Tensor]) -> Tensor:
    """Return a·a, a·b, …, b·b, … for each tensor of the lists a, b, …: a row for each tensor.

    >>> gram([torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0])])
    tensor([[ 5., 11., 25.]])
    """
    cells: list[Tensor] = []
    for each in zip(*lists, strict=True):
        first, *others = each
        flat = [first, *others] if first.dim() == 1 else _flatten_alike(first, others)
        if all(_is_exact(first, other) for other in others):
            cells += _all_pairs(*flat)
        else:
            cells += _in_pieces(_all_pairs, *flat)
    return torch.stack(cells).view(len(lists[0]), -1)


def flatten(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return one-dimensional views with one order of elements.

    Beside a sparse `b`, `a` is restricted to what it touches, which leaves their product unchanged.
    """
    if b.is_sparse:
        sparse = b.coalesce()
        return a.sparse_mask(sparse).values().reshape(-1), sparse.values().reshape(-1)
    if a.is_contiguous() and b.is_contiguous():
        return (a, b) if a.dim() == 1 else (a.view(-1), b.view(-1))
    order = sorted(range(a.dim()), key=a.stride, reverse=True)  # a view for channels_last, say
    return a.permute(order).reshape(-1), b.permute(order).reshape(-1)


def _flatten_alike(first: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    """Return one-dimensional views of dense tensors with one order of elements."""
    if first.is_contiguous() and all(other.is_contiguous() for other in others):
        return [first.view(-1), *(other.view(-1) for other in others)]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    return [tensor.permute(order).reshape(-1) for tensor in (first, *others)]


def _all_pairs(*flat: Tensor) -> list[Tensor]:
    return [a.dot(b) for a, b in combinations_with_replacement(flat, 2)]


def _in_pieces(function: Callable[..., Sequence[Tensor]], *flat: Tensor) -> Sequence[Tensor]:
    """Return the sums of a function of short vectors over all pieces of long ones."""
    pieces = zip(*([x.float() for x in tensor.split(_PIECE)] for tensor in flat), strict=True)
    rows = [torch.stack(list(function(*piece))) for piece in pieces]
    return torch.stack(rows).sum(0).unbind(0)


def _is_exact(a: Tensor, b: Tensor) -> bool:
    """Return whether `torch.dot` takes the two and keeps the digits of single precision."""
    dtype = a.dtype
    if dtype is not b.dtype:
        return False
    if dtype is torch.float32:
        return a.numel() <= _LONGEST or a.is_cuda
    return dtype is torch.float64
