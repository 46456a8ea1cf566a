"""θ′², θ′·d and d² for each tensor of a list: all that a measurement needs.

`Sums` is the interface, `choose` the one place that selects an implementation: a Triton kernel that
reads every tensor once in a single launch on an NVIDIA GPU, plain torch operations elsewhere.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import combinations_with_replacement
from typing import Any, Protocol

import torch
from torch import Tensor

from equilibrate._engine.arithmetic.dots import gram, products
from equilibrate._engine.optimizer.updates import Update

NORM, ALONG, SQUARE = range(3)
"""Columns of a measurement: N = θ′², θ′·d and d²."""

Optionals = Sequence[Tensor | None]
_Coefficients = tuple[tuple[float, float], ...]
"""Coefficients of each product of a tensor in θ′·d and in d²."""


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
    if params[0].is_cuda and find_spec("triton") is not None and all(map(is_dense, params)):
        from equilibrate._engine.arithmetic.sums_triton import TritonSums

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
        norms = _norms(params) if norm else None
        if update.source == "difference":
            self._measure_difference(params, out)
        else:
            _measure_update(update, params, gradients, buffers, norms, out)
        if norms is not None:
            out[:, NORM] = norms

    def free(self) -> None:
        """Release the copy of the parameters."""
        self._copies = None

    def _measure_difference(self, params: Sequence[Tensor], out: Tensor) -> None:
        if self._copies is None:
            out.zero_()
            return
        half = params[0].dtype not in (torch.float32, torch.float64)
        before = [c.float() for c in self._copies] if half else self._copies
        after = [p.float() if half else p for p in params]
        torch._foreach_sub_(before, after)
        _write(products(after, before), ((1.0, 0.0), (0.0, 1.0)), out)


def _measure_update(
    update: Update,
    params: Sequence[Tensor],
    gradients: Optionals,
    buffers: Optionals,
    norms: Tensor | None,
    out: Tensor,
) -> None:
    """Write θ′·d and d² of an update that is computed from gradients, buffers or both."""
    wanted = [gradients] * bool(update.gradient) + [buffers] * bool(update.buffer)
    # `None in vectors` would compare tensors with None, which is slower than all the rest.
    complete = [all(z is not None for z in vectors) for vectors in zip(*wanted, strict=True)]
    if all(complete):
        _write_update(update, params, [list(map(_dense, each)) for each in wanted], norms, out)
        return
    out.zero_()
    rows = [i for i, found in enumerate(complete) if found]
    if rows:
        vectors = [[_dense(each[i]) for i in rows] for each in wanted]
        target = out.new_empty(len(rows), 3)
        known = None if norms is None else norms[rows]
        _write_update(update, [params[i] for i in rows], vectors, known, target)
        out[rows] = target


def _write_update(
    update: Update,
    params: Sequence[Tensor],
    vectors: Sequence[Sequence[Tensor]],
    norms: Tensor | None,
    out: Tensor,
) -> None:
    """Write θ′·d and d², with N given or not, for lists of tensors without a gap."""
    beta = update.parameters
    if len(vectors) == 1 and not (beta and norms is None):
        # d = αz + βθ′: θ′·d = α θ′·z + βN and d² = α² z² + 2αβ θ′·z + β²N
        alpha = update.gradient or update.buffer
        _write(products(params, vectors[0]), ((alpha, 2 * alpha * beta), (0.0, alpha**2)), out)
        if beta and norms is not None:
            out.addr_(norms, _matrix(((beta, beta**2),), out.device)[0])
    else:
        _write(gram(params, *vectors), _coefficients(update), out)


def _write(sums: Tensor, coefficients: _Coefficients, out: Tensor) -> None:
    """Write the linear combinations of the products of each tensor into `out`."""
    matrix = _matrix(coefficients, out.device)
    torch.mm(sums.double().view(-1, len(coefficients)), matrix, out=out)


@lru_cache(maxsize=64)
def _matrix(coefficients: _Coefficients, device: torch.device) -> Tensor:
    """Return the coefficients of θ′·d and d² as a matrix, with a column of zeros for N."""
    return send([(0.0, *pair) for pair in coefficients], torch.float64, device)


def _coefficients(update: Update) -> _Coefficients:
    """Return the coefficients of all products of θ′, g and b′, for d = αg + βθ′ + γb′."""
    factors = [update.parameters, *filter(None, (update.gradient, update.buffer))]
    return tuple(
        (factors[j] if i == 0 else 0.0, factors[i] * factors[j] * (1 if i == j else 2))
        for i, j in combinations_with_replacement(range(len(factors)), 2)
    )


def send(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on the device, without waiting for it."""
    host = torch.tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _norms(params: Sequence[Tensor]) -> Tensor:
    """Return N of each tensor. The norm is taken in float64 because N is used in differences."""
    return torch.stack(torch._foreach_norm(list(params), 2, torch.float64)).square()


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one stretch of memory, in whatever order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _dense(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_dense() if tensor.is_sparse else tensor
