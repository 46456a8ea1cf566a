"""θ′², θ′·d and d² for each tensor of a list: all that a measurement needs.

`Sums` is the interface, `choose` the one place that selects an implementation: a Triton kernel that
reads every tensor once in a single launch on an NVIDIA GPU, plain torch operations elsewhere.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from equilibrate._engine.dots import gram, products
from equilibrate._engine.updates import Update

NORM, ALONG, SQUARE = range(3)
"""Columns of a measurement: N = θ′², θ′·d and d²."""

Optionals = Sequence[Tensor | None]


class Sums(Protocol):
    """Measures the parameters of one bucket: tensors of fixed shapes, one device, one dtype."""

    def save(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters, for an update of source "difference"."""
        ...

    def measure(
        self,
        update: Update,
        params: Sequence[Tensor],
        gradients: Optionals,
        buffers: Optionals,
        out: Tensor,
        *,
        norm: bool,
    ) -> None:
        """Write N, θ′·d and d² of each parameter, in float64, into `out` of shape (tensors, 3).

        For an update of source "difference" d is θ − θ′, with θ from the last `save`. Where the
        update needs a gradient or buffer that is None, d is zero. N may be left at zero if `norm`
        is false.
        """
        ...

    def free(self) -> None:
        """Release the copy of the parameters."""
        ...


def choose(params: Sequence[Tensor]) -> Sums:
    """Return the fastest implementation for these parameters."""
    if params[0].is_cuda and find_spec("triton") is not None and all(map(_is_dense, params)):
        from equilibrate._engine.sums_triton import TritonSums

        return TritonSums(params)
    return TorchSums()


class TorchSums:
    """`Sums` in plain torch operations, on any device that has float64.

    Dot products are in the precision of the parameters but in short pieces, so that they are
    exact to about 1e-7. N is a difference of large numbers between two measurements and is summed
    in float64.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] | None = None

    def save(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters."""
        if self._copies is None:
            self._copies = [torch.empty_like(p) for p in params]
        torch._foreach_copy_(self._copies, list(params))

    def measure(
        self,
        update: Update,
        params: Sequence[Tensor],
        gradients: Optionals,
        buffers: Optionals,
        out: Tensor,
        *,
        norm: bool,
    ) -> None:
        """Write the sums of each parameter into `out`; see `Sums.measure`."""
        out.zero_()
        if norm:
            out[:, NORM] = _norms(params)
        if update.source == "difference":
            if self._copies is not None:
                self._along_difference(params, out)
            return
        wanted = [gradients] * bool(update.gradient) + [buffers] * bool(update.buffer)
        rows = [i for i, found in enumerate(zip(*wanted, strict=True)) if None not in found]
        if not rows:
            return
        params = [params[i] for i in rows]
        vectors = [[_dense(each[i]) for i in rows] for each in wanted]
        sums = _products(params, vectors[0]) if update.source == "buffer" else None
        if sums is None:
            sums = _combined(update, gram(params, *vectors))
        if len(rows) == len(out):
            out[:, ALONG:] = sums
        else:
            out[rows, ALONG:] = sums

    def free(self) -> None:
        """Release the copy of the parameters."""
        self._copies = None

    def _along_difference(self, params: Sequence[Tensor], out: Tensor) -> None:
        assert self._copies is not None
        half = params[0].dtype not in (torch.float32, torch.float64)
        before = [c.float() for c in self._copies] if half else self._copies
        after = [p.float() if half else p for p in params]
        torch._foreach_sub_(before, after)
        out[:, ALONG:] = _products(after, before)


def _norms(params: Sequence[Tensor]) -> Tensor:
    """N of each tensor. The norm is taken in float64 because N is used in differences."""
    return torch.stack(torch._foreach_norm(list(params), 2, torch.float64)).square()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one stretch of memory, in whatever order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _dense(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_dense() if tensor.is_sparse else tensor


def _products(params: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
    return products(params, vectors).double().view(-1, 2)


def _combined(update: Update, sums: Sequence[Tensor]) -> Tensor:
    """θ′·d and d² of d = αg + βθ′ + γb′ from all products of θ′, g and b′."""
    alpha, beta, gamma = update.gradient, update.parameters, update.buffer
    if update.source == "gradient":
        pp, pg, gg = sums
        pb = gb = bb = 0.0
    else:
        pp, pg, pb, gg, gb, bb = sums
    along = alpha * pg + beta * pp + gamma * pb
    square = (
        alpha**2 * gg
        + beta**2 * pp
        + gamma**2 * bb
        + 2 * (alpha * beta * pg + alpha * gamma * gb + beta * gamma * pb)
    )
    return torch.stack([along, square], dim=1)
