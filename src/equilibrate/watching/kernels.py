"""`Sums` and `Means` in one launch each: every tensor is read once."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from equilibrate.watching.means import Lists, precision
from equilibrate.watching.sums import Optionals, send

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_BLOCK = 1024
_PROGRAMS = 2048
"""Programs aimed at: enough to fill a GPU, few enough that adding up their parts is cheap."""
_ROWS = 256
"""Rows of a table of addresses. They change only if gradients are computed again, for which an
eager step launches several kernels. About a thousand can be queued, so no row is overwritten before
it was read."""
_stride, _dtype, _is_sparse = Tensor.stride, attrgetter("dtype"), attrgetter("is_sparse")


@triton.jit
def sums_kernel(
    addresses, tensor_of, start_of, size_of, parts,
    COUNT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr,
    DIFFERENCE: tl.constexpr,
):  # fmt: skip
    """Sum θ², θ·d and d² over one chunk of one tensor in float64.

    `addresses` holds those of all θ, then of all x. d is x − θ if DIFFERENCE, or else x, which is
    zero where its address is 0.
    """
    chunk = tl.program_id(0)
    t = tl.load(tensor_of + chunk)
    start = tl.load(start_of + chunk)
    size = tl.load(size_of + t)
    p = tl.load(addresses + t).to(tl.pointer_type(P))
    address = tl.load(addresses + COUNT + t)
    x = address.to(tl.pointer_type(P))
    known = tl.where(address != 0, size, 0)
    norm = tl.zeros((BLOCK,), tl.float64)
    along = tl.zeros((BLOCK,), tl.float64)
    square = tl.zeros((BLOCK,), tl.float64)
    for k in range(0, CHUNK, BLOCK):
        at = start + k + tl.arange(0, BLOCK)
        theta = tl.load(p + at, at < size, other=0.0).to(tl.float64)
        d = tl.load(x + at, at < known, other=0.0).to(tl.float64)
        if DIFFERENCE:
            d -= theta
        norm += theta * theta
        along += theta * d
        square += d * d
    tl.store(parts + 3 * chunk, tl.sum(norm, axis=0))
    tl.store(parts + 3 * chunk + 1, tl.sum(along, axis=0))
    tl.store(parts + 3 * chunk + 2, tl.sum(square, axis=0))


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


class Chunks:
    """Tensors of fixed shapes cut into chunks, one for each program of a kernel.

    Triton finds a compiled kernel by the types, alignments and constants of all arguments, which
    takes the host longer than the launch itself. Here it is found once for each key, and tensors
    are then passed as addresses. The table of addresses is read from pinned memory of the host:
    gradients move at most steps, and copying a table would cost two calls for each.

    Args:
        kernel: A function decorated with `triton.jit`, whose first arguments are the table, the
            tensor and the start of each chunk, and the size of each tensor.
        params: The tensors.
    """

    def __init__(self, kernel: Any, params: Sequence[Tensor]) -> None:
        self.device, self.dtype = params[0].device, params[0].dtype
        self.sizes = [p.numel() for p in params]
        self.strides = list(map(_stride, params))
        wanted = min(-(-sum(self.sizes) // _PROGRAMS), 1 << 17)
        self.size = max(_BLOCK, triton.next_power_of_2(wanted))
        starts = [(t, s) for t, n in enumerate(self.sizes) for s in range(0, n, self.size)]
        self.tensor_of = [t for t, _ in starts]
        self._kernel = kernel
        self._tables = [
            send(self.tensor_of, torch.int32, self.device),
            send([start for _, start in starts], torch.int64, self.device),
            send(self.sizes, torch.int64, self.device),
        ]
        pinned = self.device.type == "cuda"
        shape = _ROWS, 2 * len(params)
        rows = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._rows, self._arrays = rows.unbind(0), list(rows.numpy())
        self._place, self._last = 0, [-1]
        self._compiles = isinstance(kernel, JITFunction)  # and is not interpreted
        self._runners: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.tensor_of)

    def launch(self, key: Hashable, first: Optionals, second: Optionals, *arguments: Any) -> None:
        """Launch the kernel with the addresses of two lists of tensors.

        Args:
            key: What differs between calls that need different code.
            first: Tensors, laid out as those given at first.
            second: Tensors, laid out as those given at first; None has the address 0.
            arguments: All other arguments in order, constants included.
        """
        pointers = [0 if t is None else t.data_ptr() for t in (*first, *second)]
        if pointers != self._last:
            self._place = (self._place + 1) % _ROWS
            self._arrays[self._place][: len(pointers)] = pointers
            self._last = pointers
        given = (self._rows[self._place], *self._tables, *arguments)
        grid = (len(self), 1, 1)
        if not self._compiles:
            self._kernel[grid](*given)
            return
        with torch.cuda.device(self.device):
            runner = self._runners.get(key)
            if runner is None:
                self._runners[key] = self._kernel[grid](*given)[grid]
                return
            stream = torch._C._cuda_getCurrentRawStream(self.device.index)
            runner(*(a.data_ptr() if isinstance(a, Tensor) else a for a in given), stream=stream)

    def arranged(self, tensors: Optionals) -> Optionals:
        """Return tensors with the dtype and order of elements in memory of those given first."""
        found = [t for t in tensors if t is not None]
        if any(map(_is_sparse, found)) or {*map(_dtype, found)} - {self.dtype}:
            tensors = [t if t is None else _dense(t).to(self.dtype) for t in tensors]
        if len(found) == len(tensors) and list(map(_stride, tensors)) == self.strides:
            return tensors
        pairs = zip(tensors, self.strides, strict=True)
        return [
            t if t is None or t.stride() == stride else _rearranged(t, stride)
            for t, stride in pairs
        ]


class TritonSums:
    """`Sums` in one kernel launch and one small matrix product.

    Each program sums one chunk of one tensor; a product with a matrix of zeros and ones then adds
    up the chunks of each tensor, so that the result does not depend on the order in which programs
    finish.

    Args:
        params: The parameters.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._chunks = Chunks(sums_kernel, params)
        adding = torch.zeros(len(params), len(self._chunks), dtype=torch.float64, device="cpu")
        adding[self._chunks.tensor_of, range(len(self._chunks))] = 1.0
        self._adding = adding.to(params[0].device)
        self._parts = torch.zeros(
            len(self._chunks), 3, dtype=torch.float64, device=params[0].device
        )
        self._copies: list[Tensor] | None = None

    def save(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters before a step."""
        if self._copies is None:
            self._copies = [torch.empty_like(p) for p in params]
        torch._foreach_copy_(self._copies, list(params))

    def measure(self, params: Sequence[Tensor], out: Tensor, *, norm: bool) -> None:
        """Write the sums of each parameter; see `Sums.measure`."""
        assert self._copies is not None
        self._write(params, self._copies, out, difference=True)

    def inner(self, params: Sequence[Tensor], vectors: Optionals, out: Tensor) -> None:
        """Write N and θ·x of each parameter; see `Sums.inner`."""
        self._write(params, self._chunks.arranged(vectors), out, difference=False)

    def free(self) -> None:
        """Release the copy of the parameters."""
        self._copies = None

    def _write(
        self, params: Sequence[Tensor], vectors: Optionals, out: Tensor, *, difference: bool
    ) -> None:
        if not len(self._chunks):
            out.zero_()
            return
        self._chunks.launch(
            difference, self._chunks.arranged(params), vectors, self._parts,
            len(params), self._chunks.size, _BLOCK, _TYPES[self._chunks.dtype], difference,
        )  # fmt: skip
        torch.mm(self._adding, self._parts, out=out)


class TritonMeans:
    """`Means` in one kernel launch and one small matrix product.

    The means lie in one flat buffer, with their elements in the order in which the parameters' lie
    in memory. See `TritonSums` for how chunks are added up.

    Args:
        params: The parameters.
        count: Number of means.
        weights: The weight of each parameter.
    """

    def __init__(self, params: Sequence[Tensor], count: int, weights: Sequence[float]) -> None:
        device, sizes = params[0].device, [p.numel() for p in params]
        self._chunks = chunks = Chunks(means_kernel, params)
        self._kept = precision(params[0].dtype)
        self._flat = torch.zeros(count, sum(sizes), dtype=self._kept, device=device)
        offsets = [sum(sizes[:t]) for t in range(len(sizes))]
        self._offset_of = send(offsets, torch.int64, device)
        self._weights = send([[float(weights[t]) for t in chunks.tensor_of]], torch.float64, device)
        self._parts = torch.zeros(len(chunks), count, dtype=torch.float64, device=device)
        self._views = [_views(mean, params) for mean in self._flat]

    def measure(
        self, params: Sequence[Tensor], gradients: Optionals, out: Tensor, shares: Sequence[float]
    ) -> None:
        """Write the sums and move the means; see `Means.measure`."""
        chunks, means = self._chunks, len(shares)
        if not len(chunks):
            out.zero_()
            return
        thetas, found = chunks.arranged(params), chunks.arranged(gradients)  # kept for the launch
        chunks.launch(
            None, thetas, found, self._offset_of, self._flat,
            send(list(shares), torch.float64, chunks.device), self._parts,
            len(params), self._flat.shape[1], means, triton.next_power_of_2(means), chunks.size,
            _BLOCK, _TYPES[chunks.dtype], _TYPES[self._kept],
        )  # fmt: skip
        torch.mm(self._weights, self._parts, out=out[None])

    def tensors(self) -> Lists:
        """Return the means; see `Means.tensors`."""
        return self._views


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _rearranged(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy of a tensor with another order of elements."""
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def _views(mean: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat mean with the shapes and the order of elements of the parameters."""
    parts = mean.split([p.numel() for p in params])
    return [
        part.as_strided(p.shape, p.stride(), part.storage_offset())
        for part, p in zip(parts, params, strict=True)
    ]
