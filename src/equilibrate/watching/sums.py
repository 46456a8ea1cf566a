"""N = |θ′|², θ′·d and d² with d = θ − θ′, for each tensor of a list: all that a reading needs.

A step is measured by a copy of the parameters before it, so that nothing need be known of the
optimizer. `choose` selects the implementation: a Triton kernel that reads every tensor once in a
single launch on an NVIDIA GPU, plain torch operations elsewhere.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

NORM, ALONG, SQUARE = range(3)
"""Columns of a measurement: N = θ′², θ′·d and d²."""
Optionals = Sequence[Tensor | None]

# A single-precision dot product loses digits as it grows (3e-5 at two million terms on a CPU).
_LONGEST = 1 << 18
# Short enough that what one operation has read or written is still in the core's cache.
_PIECE = 1 << 16


class Sums(Protocol):
    """Measures the parameters of one bucket: tensors of fixed shapes, one device, one dtype."""

    def save(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters before a step."""

    def measure(self, params: Sequence[Tensor], out: Tensor, *, norm: bool) -> None:
        """Write the three sums of each parameter, in float64, into `out` of shape (tensors, 3).

        d is the difference to the last `save`. N is not defined if `norm` is false.
        """

    def inner(self, params: Sequence[Tensor], vectors: Optionals, out: Tensor) -> None:
        """Write N and θ·x for a vector x of each parameter; zero where there is none."""

    def free(self) -> None:
        """Release the copy of the parameters."""


def choose(params: Sequence[Tensor]) -> Sums:
    """Return the fastest implementation for these parameters."""
    if uses_triton(params):
        from equilibrate.watching.kernels import TritonSums

        return TritonSums(params)
    return TorchSums()


def uses_triton(params: Sequence[Tensor]) -> bool:
    """Return whether Triton's kernels can be used for these parameters."""
    return params[0].is_cuda and find_spec("triton") is not None and all(map(_is_dense, params))


class TorchSums:
    """`Sums` in plain torch operations, on any device that has float64.

    Dot products are in the precision of the parameters but in short pieces, so that they are
    exact to about 1e-7. N is used in differences and is summed in float64.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] | None = None

    def save(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters before a step."""
        if self._copies is None:
            self._copies = [p.detach().clone() for p in params]
        else:
            torch._foreach_copy_(self._copies, list(params))

    def measure(self, params: Sequence[Tensor], out: Tensor, *, norm: bool) -> None:
        """Write the sums of each parameter; see `Sums.measure`."""
        assert self._copies is not None
        half = params[0].dtype not in (torch.float32, torch.float64)
        before = [c.float() for c in self._copies] if half else self._copies
        after = [p.float() for p in params] if half else list(params)
        torch._foreach_sub_(before, after)
        if norm:
            out[:, NORM] = norms(after)
        cells: list[Tensor] = []
        for p, d in zip(after, before, strict=True):
            cells += _products(p.detach(), d)
        out[:, ALONG:] = torch.stack(cells).view(-1, 2)

    def inner(self, params: Sequence[Tensor], vectors: Optionals, out: Tensor) -> None:
        """Write N and θ·x of each parameter; see `Sums.inner`."""
        out[:, NORM] = norms(params)
        out[:, ALONG:] = 0.0
        for row, p, x in zip(out.unbind(0), params, vectors, strict=True):
            if x is not None:
                row[ALONG] = dot(p, x)

    def free(self) -> None:
        """Release the copy of the parameters."""
        self._copies = None


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b in single or double precision; b may be sparse, or of another precision.

    >>> dot(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor(11.)
    """
    x, y = flatten(a, b)
    if _is_exact(x, y):
        return x.dot(y)
    return _in_pieces(lambda x, y: [x.dot(y)], x, y)[0]


def _products(a: Tensor, b: Tensor) -> Sequence[Tensor]:
    """Return a·b and b·b of dense tensors of one shape and dtype."""
    x, y = flatten(a, b)
    if _is_exact(x, y):
        return x.dot(y), y.dot(y)
    return _in_pieces(lambda x, y: [x.dot(y), y.dot(y)], x, y)


def norms(params: Sequence[Tensor]) -> Tensor:
    """Return N of each tensor, in float64, because it is used in differences."""
    return torch.stack(torch._foreach_norm(list(params), 2, torch.float64)).square()


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


def send(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on the device, without waiting for it."""
    host = torch.tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def on_device(number: Tensor, like: Tensor) -> Tensor:
    """Return a number on the device of another tensor, without waiting for it."""
    return number.detach().reshape(()).to(like.device, non_blocking=True)


def _in_pieces(function: Callable[..., Sequence[Tensor]], *flat: Tensor) -> Sequence[Tensor]:
    """Return the sums of a function of short vectors over all pieces of long ones."""
    dtypes = {x.dtype for x in flat}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    pieces = zip(*([x.to(dtype) for x in t.split(_PIECE)] for t in flat), strict=True)
    rows = [torch.stack(list(function(*piece))) for piece in pieces]
    return torch.stack(rows).double().sum(0).unbind(0)


def _is_exact(a: Tensor, b: Tensor) -> bool:
    """Return whether `torch.dot` takes the two and keeps the digits of single precision."""
    dtype = a.dtype
    if dtype is not b.dtype:
        return False
    if dtype is torch.float32:
        return a.numel() <= _LONGEST or a.is_cuda
    return dtype is torch.float64


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one stretch of memory, in whatever order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
