"""`Means` in one launch: all tensors and all means, through a table of addresses."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from equilibrate._engine.arithmetic.address_table import AddressTable
from equilibrate._engine.arithmetic.launcher import Launcher
from equilibrate._engine.arithmetic.means import Lists, first_shares, precision
from equilibrate._engine.arithmetic.sums import Optionals, send
from equilibrate._engine.arithmetic.sums_triton import (
    _TYPES,
    _addresses,
    _dtype,
    _is_sparse,
    _stride,
)

_BLOCK = 1024
_PROGRAMS = 2048
"""Programs aimed at: enough to fill a GPU, few enough that adding up their parts is cheap."""


@triton.jit
def means_kernel(
    addresses, tensor_of, start_of, size_of, offset_of, flat, shares, parts,
    COUNT: tl.constexpr, TOTAL: tl.constexpr, MEANS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Sum (θ − m)·g over one chunk of one tensor for each mean m, and move the means towards θ.

    `addresses` holds those of all θ, then of all g, 0 for no gradient. `flat` holds the means
    one after the other, TOTAL elements each. Each moves by its share of the difference. Tiles
    have a row for each mean; their number must be a power of two.
    """
    chunk = tl.program_id(0)
    t = tl.load(tensor_of + chunk)
    start = tl.load(start_of + chunk)
    size = tl.load(size_of + t)
    offset = tl.load(offset_of + t)
    p = tl.load(addresses + t).to(tl.pointer_type(P))
    address = tl.load(addresses + COUNT + t)
    g = address.to(tl.pointer_type(P))
    known = tl.where(address != 0, size, 0)
    rows = tl.arange(0, ROWS)
    share = tl.load(shares + rows, rows < MEANS, other=0.0).to(M)
    base = flat + rows.to(tl.int64)[:, None] * TOTAL + offset
    sums = tl.zeros((ROWS, BLOCK), tl.float64)
    for k in range(0, CHUNK, BLOCK):
        at = start + k + tl.arange(0, BLOCK)
        used = (rows < MEANS)[:, None] & (at < size)[None, :]
        theta = tl.load(p + at, at < size, other=0.0).to(M)
        m = tl.load(base + at[None, :], used, other=0.0)
        difference = theta[None, :] - m
        gradient = tl.load(g + at, at < known, other=0.0).to(tl.float64)
        sums += difference.to(tl.float64) * gradient[None, :]
        tl.store(base + at[None, :], m + share[:, None] * difference, used)
    tl.store(parts + MEANS * chunk + rows, tl.sum(sums, axis=1), rows < MEANS)


class TritonMeans:
    """`Means` in one kernel launch and one small matrix product.

    Each program reads one chunk of one tensor; a product with a row of weights then adds up the
    chunks, so that the result does not depend on the order in which programs finish. The means lie
    in one flat buffer, with their elements in the order in which the parameters' lie in memory.

    Args:
        params: The parameters.
        decays: The decay of each mean.
        weights: The weight of each parameter.
    """

    def __init__(
        self, params: Sequence[Tensor], decays: Sequence[float], weights: Sequence[float]
    ) -> None:
        self._device = params[0].device
        self._dtype = params[0].dtype
        sizes = [p.numel() for p in params]
        self._total = sum(sizes)
        kept = precision(self._dtype)
        self._kind = _TYPES[kept]
        self._flat = torch.zeros(len(decays), self._total, dtype=kept, device=self._device)
        wanted = min(-(-self._total // _PROGRAMS), 1 << 17)
        self._chunk = max(_BLOCK, triton.next_power_of_2(wanted))
        chunks = [(t, s) for t, size in enumerate(sizes) for s in range(0, size, self._chunk)]
        offsets = [sum(sizes[:t]) for t in range(len(sizes))]
        self._tensor_of = self._send([t for t, _ in chunks], torch.int32)
        self._start_of = self._send([start for _, start in chunks], torch.int64)
        self._size_of = self._send(sizes, torch.int64)
        self._offset_of = self._send(offsets, torch.int64)
        self._decays = tuple(decays)
        self._shares: tuple[list[float], Tensor] | None = None
        self._weights = self._send([[float(weights[t]) for t, _ in chunks]], torch.float64)
        self._parts = torch.zeros(
            len(chunks), len(decays), dtype=torch.float64, device=self._device
        )
        self._views = [_views(mean, params) for mean in self._flat]
        self._strides = list(map(_stride, params))
        self._launch = Launcher(means_kernel, len(chunks), self._device)
        self._table = AddressTable(2 * len(sizes), self._device)

    def measure(
        self, params: Sequence[Tensor], gradients: Optionals, out: Tensor, count: int
    ) -> None:
        """Write the sums and move the means; see `Means.measure`."""
        if not len(self._parts):
            out.zero_()
            return
        thetas, found = self._arranged(params), self._arranged(gradients)  # kept until the launch
        means = self._parts.shape[1]
        self._launch(
            None, self._table.put([*_addresses(thetas), *_addresses(found)]),
            self._tensor_of, self._start_of, self._size_of, self._offset_of,
            self._flat, self._moves(count), self._parts,
            len(params), self._total, means, triton.next_power_of_2(means), self._chunk, _BLOCK,
            _TYPES[self._dtype], self._kind,
        )  # fmt: skip
        torch.mm(self._weights, self._parts, out=out[None])

    def tensors(self) -> Lists:
        """Return the means; see `Means.tensors`."""
        return self._views

    def _arranged(self, tensors: Optionals) -> Optionals:
        """Return the tensors with their elements in the same order in memory as the means'."""
        found = [t for t in tensors if t is not None]
        if any(map(_is_sparse, found)) or {*map(_dtype, found)} - {self._dtype}:
            tensors = [t if t is None else _dense(t).to(self._dtype) for t in tensors]
        if len(found) == len(tensors) and list(map(_stride, tensors)) == self._strides:
            return tensors
        pairs = zip(tensors, self._strides, strict=True)
        return [
            t if t is None or t.stride() == stride else _copied(t, stride) for t, stride in pairs
        ]

    def _moves(self, count: int) -> Tensor:
        """Return by which share each mean moves, sent to the device if it has changed."""
        shares = first_shares(self._decays, count)
        if self._shares is None or shares != self._shares[0]:
            self._shares = shares, self._send(shares, torch.float64)
        return self._shares[1]

    def _send(self, values: list, dtype: torch.dtype) -> Tensor:
        return send(values, dtype, self._device)


def _copied(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy of a tensor with another order of elements."""
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _views(mean: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat mean with the shapes and the order of elements of the parameters."""
    parts = mean.split([p.numel() for p in params])
    return [
        part.as_strided(p.shape, p.stride(), part.storage_offset())
        for part, p in zip(parts, params, strict=True)
    ]
