"""`Means` in one launch: all tensors and all means, through a table of addresses."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from equilibrate._engine.means import Lists, first_shares, precision
from equilibrate._engine.sums import Optionals, send
from equilibrate._engine.sums_triton import _TYPES, _addresses, _laid_out_as

_BLOCK = 1024
_PROGRAMS = 2048
"""Programs aimed at: enough to fill a GPU, few enough that adding up their parts is cheap."""


@triton.jit
def means_kernel(
    addresses, tensor_of, start_of, size_of, offset_of, flat, shares, parts, total,
    MEANS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    P: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Sum (θ − m)·g over one chunk of one tensor for each mean m, and move the means towards θ.

    `addresses` holds those of θ and g for each tensor, 0 for no gradient. `flat` holds the means
    one after the other, `total` elements each. Each moves by its share of the difference. Tiles
    have a row for each mean; their number must be a power of two.
    """
    chunk = tl.program_id(0)
    t = tl.load(tensor_of + chunk)
    start = tl.load(start_of + chunk)
    size = tl.load(size_of + t)
    offset = tl.load(offset_of + t)
    p = tl.load(addresses + 2 * t).to(tl.pointer_type(P))
    address = tl.load(addresses + 2 * t + 1)
    g = address.to(tl.pointer_type(P))
    known = tl.where(address != 0, size, 0)
    rows = tl.arange(0, ROWS)
    share = tl.load(shares + rows, rows < MEANS, other=0.0).to(M)
    base = flat + rows.to(tl.int64)[:, None] * total + offset
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
        self._contiguous = all(p.is_contiguous() for p in params)
        self._sent: list[int] = []
        self._table: Tensor | None = None

    def measure(
        self, params: Sequence[Tensor], gradients: Optionals, out: Tensor, count: int
    ) -> None:
        """Write the sums and move the means; see `Means.measure`."""
        if not len(self._parts):
            out.zero_()
            return
        found = gradients
        if not self._fit(gradients):
            found = list(map(_laid_out_as, params, gradients))  # kept until the launch
        means, moves = self._parts.shape[1], self._moves(count)
        means_kernel[(len(self._parts),)](
            self._point(params, found), self._tensor_of, self._start_of, self._size_of,
            self._offset_of, self._flat, moves, self._parts, self._total,
            MEANS=means, ROWS=triton.next_power_of_2(means), CHUNK=self._chunk, BLOCK=_BLOCK,
            P=_TYPES[self._dtype], M=self._kind,
        )  # fmt: skip
        torch.mm(self._weights, self._parts, out=out[None])

    def tensors(self) -> Lists:
        """Return the means; see `Means.tensors`."""
        return self._views

    def _fit(self, gradients: Optionals) -> bool:
        """Return whether the gradients lie in memory as the parameters do."""
        return self._contiguous and all(
            g is None or (g.dtype is self._dtype and not g.is_sparse and g.is_contiguous())
            for g in gradients
        )

    def _moves(self, count: int) -> Tensor:
        """Return by which share each mean moves, sent to the device if it has changed."""
        shares = first_shares(self._decays, count)
        if self._shares is None or shares != self._shares[0]:
            self._shares = shares, self._send(shares, torch.float64)
        return self._shares[1]

    def _point(self, params: Sequence[Tensor], gradients: Optionals) -> Tensor:
        """Return the table of addresses, sent to the device if one has changed."""
        pairs = zip(params, _addresses(gradients), strict=True)
        addresses = [a for p, g in pairs for a in (p.data_ptr(), g)]
        if self._table is None or addresses != self._sent:
            self._table, self._sent = self._send(addresses, torch.int64), addresses
        return self._table

    def _send(self, values: list, dtype: torch.dtype) -> Tensor:
        return send(values, dtype, self._device)


def _views(mean: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat mean with the shapes and the order of elements of the parameters."""
    parts = mean.split([p.numel() for p in params])
    return [
        part.as_strided(p.shape, p.stride(), part.storage_offset())
        for part, p in zip(parts, params, strict=True)
    ]
