"""`Sums` in one launch: every tensor of a list is read once, through a table of addresses."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch
import triton
import triton.language as tl
from torch import Tensor

from equilibrate._engine.arithmetic.address_table import AddressTable
from equilibrate._engine.arithmetic.launcher import Launcher
from equilibrate._engine.arithmetic.sums import Optionals, send
from equilibrate._engine.optimizer.updates import Update

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_BLOCK = 1024
_SMALL = 1 << 18
"""Elements up to which one program reads a whole tensor, which saves adding up chunks."""
_PROGRAMS = 2048
"""Programs aimed at: enough to fill a GPU, few enough that adding up their parts is cheap."""


@triton.jit
def chunk_sums_kernel(
    addresses, tensor_of, start_of, size_of, parts, alpha, beta, gamma,
    COUNT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    P: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
):  # fmt: skip
    """Sum θ′², θ′·d and d² over one chunk of one tensor, with d = αx + βθ′ + γy in float64.

    `addresses` holds those of all θ′, then of all x, then of all y. X and Y are their types, or
    None for a tensor that is not used. Where one that is used has the address 0, d is zero.
    """
    chunk = tl.program_id(0)
    t = tl.load(tensor_of + chunk)
    start = tl.load(start_of + chunk)
    size = tl.load(size_of + t)
    p = tl.load(addresses + t).to(tl.pointer_type(P))
    moved = size  # elements that the step moved
    if X is not None:
        x_address = tl.load(addresses + COUNT + t)
        moved = tl.where(x_address != 0, moved, 0)
        x = x_address.to(tl.pointer_type(X))
    if Y is not None:
        y_address = tl.load(addresses + 2 * COUNT + t)
        moved = tl.where(y_address != 0, moved, 0)
        y = y_address.to(tl.pointer_type(Y))
    norm = tl.zeros((BLOCK,), tl.float64)
    along = tl.zeros((BLOCK,), tl.float64)
    square = tl.zeros((BLOCK,), tl.float64)
    for k in range(0, CHUNK, BLOCK):
        at = start + k + tl.arange(0, BLOCK)
        theta = tl.load(p + at, at < size, other=0.0).to(tl.float64)
        norm += theta * theta
        d = beta * theta
        if X is not None:
            d += alpha * tl.load(x + at, at < moved, other=0.0).to(tl.float64)
        if Y is not None:
            d += gamma * tl.load(y + at, at < moved, other=0.0).to(tl.float64)
        d = tl.where(at < moved, d, 0.0)
        along += theta * d
        square += d * d
    tl.store(parts + 3 * chunk, tl.sum(norm, axis=0))
    tl.store(parts + 3 * chunk + 1, tl.sum(along, axis=0))
    tl.store(parts + 3 * chunk + 2, tl.sum(square, axis=0))


@triton.jit
def copy_kernel(
    addresses, tensor_of, start_of, size_of, offset_of, flat,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Copy one chunk of one tensor into a flat buffer."""
    chunk = tl.program_id(0)
    t = tl.load(tensor_of + chunk)
    start = tl.load(start_of + chunk)
    size = tl.load(size_of + t)
    offset = tl.load(offset_of + t)
    p = tl.load(addresses + t).to(tl.pointer_type(P))
    for k in range(0, CHUNK, BLOCK):
        at = start + k + tl.arange(0, BLOCK)
        tl.store(flat + offset + at, tl.load(p + at, at < size), at < size)


class TritonSums:
    """`Sums` in one kernel launch and, if tensors are large, one small matrix product.

    Each program sums one chunk of one tensor; a product with a matrix of zeros and ones then adds
    up the chunks of each tensor, so that the result does not depend on the order in which programs
    finish.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._device = params[0].device
        self._type = _TYPES[params[0].dtype]
        sizes = [p.numel() for p in params]
        total = sum(sizes)
        self._direct = min(sizes) > 0 and max(sizes) <= _SMALL
        """Whether each tensor is one chunk, whose sums the kernel writes into the result."""
        self._block = 4 * _BLOCK if self._direct else _BLOCK
        wanted = max(sizes) if self._direct else min(-(-total // _PROGRAMS), 1 << 17)
        self._chunk = max(self._block, triton.next_power_of_2(wanted))
        chunks = [(t, s) for t, size in enumerate(sizes) for s in range(0, size, self._chunk)]
        tensor_of = [t for t, _ in chunks]
        self._tensor_of = self._upload(tensor_of, torch.int32)
        self._start_of = self._upload([start for _, start in chunks], torch.int64)
        self._size_of = self._upload(sizes, torch.int64)
        offsets = [sum(sizes[:t]) for t in range(len(sizes))]
        self._offsets = [offset * params[0].element_size() for offset in offsets]
        self._total, self._dtype = total, params[0].dtype
        self._strides = list(map(_stride, params))
        self._fitting: Optionals = ()
        """Buffers that were found to have these strides."""
        self._offset_of = self._upload(offsets, torch.int64)
        adding = torch.zeros(len(sizes), len(chunks), dtype=torch.float64, device="cpu")
        adding[tensor_of, range(len(chunks))] = 1.0
        self._adding = adding.to(self._device)
        self._parts = torch.zeros(len(chunks), 3, dtype=torch.float64, device=self._device)
        self._table = AddressTable(3 * len(sizes), self._device)
        self._nothing = [0] * len(sizes)
        self._sums = Launcher(chunk_sums_kernel, len(chunks), self._device)
        self._copies = Launcher(copy_kernel, len(chunks), self._device)
        self._copy: Tensor | None = None

    def save(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters."""
        if self._copy is None:
            self._copy = torch.empty(self._total, dtype=self._dtype, device=self._device)
        if len(self._parts):
            self._copies(
                None, self._point(params, self._copied(), self._nothing),
                self._tensor_of, self._start_of, self._size_of, self._offset_of,
                self._copy, self._chunk, self._block, self._type,
            )  # fmt: skip

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
        if not len(self._parts):
            out.zero_()
            return
        xs = ys = self._nothing
        alpha, beta, x_type, y_type = update.gradient, update.parameters, None, None
        used: list[Tensor | None] = []  # kept until the launch: only addresses are passed on
        if update.source == "difference" and self._copy is not None:
            xs = self._copied()
            alpha, beta, x_type = 1.0, -1.0, self._type
        if update.gradient:
            used += (found := self._laid_out(params, gradients))
            xs, x_type = _addresses(found), self._type
        if update.buffer:
            used += (found := self._buffers_laid_out(params, buffers))
            ys, y_type = _addresses(found), self._type
        direct = self._direct and out.is_contiguous()
        target = out if direct else self._parts
        self._sums(
            (x_type, y_type, target.data_ptr() % 16), self._point(params, xs, ys),
            self._tensor_of, self._start_of, self._size_of, target,
            alpha, beta, update.buffer,
            len(xs), self._chunk, self._block, self._type, x_type, y_type,
        )  # fmt: skip
        if not direct:
            torch.mm(self._adding, self._parts, out=out)

    def free(self) -> None:
        """Release the copy of the parameters."""
        self._copy = None

    def _buffers_laid_out(self, params: Sequence[Tensor], buffers: Optionals) -> Optionals:
        """Return momentum buffers, the same tensors at each step, in the parameters' order."""
        if len(buffers) == len(self._fitting) and all(map(is_, buffers, self._fitting)):
            return buffers
        laid_out = self._laid_out(params, buffers)
        self._fitting = buffers if laid_out is buffers else ()
        return laid_out

    def _laid_out(self, params: Sequence[Tensor], tensors: Optionals) -> Optionals:
        """Return the tensors with their elements in the same order in memory as the parameters'."""
        found = [t for t in tensors if t is not None]
        if any(map(_is_sparse, found)) or {*map(_dtype, found)} != {self._dtype}:
            return list(map(_laid_out_as, params, tensors))
        if len(found) == len(params):
            fits = list(map(_stride, found)) == self._strides
        else:
            pairs = zip(tensors, self._strides, strict=True)
            fits = all(t is None or t.stride() == stride for t, stride in pairs)
        return tensors if fits else list(map(_laid_out_as, params, tensors))

    def _point(self, params: Sequence[Tensor], xs: list[int], ys: list[int]) -> Tensor:
        return self._table.put([*map(_address, params), *xs, *ys])

    def _copied(self) -> list[int]:
        """Return where the copies of the parameters are."""
        assert self._copy is not None
        base = self._copy.data_ptr()
        return [base + offset for offset in self._offsets]

    def _upload(self, values: list[int], dtype: torch.dtype) -> Tensor:
        return send(values, dtype, self._device)


def _laid_out_as(p: Tensor, x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    if x.is_sparse:
        x = x.to_dense()
    if x.stride() == p.stride() and x.dtype is p.dtype:
        return x
    return torch.empty_like(p).copy_(x)


def _addresses(tensors: Optionals) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


_address, _stride = Tensor.data_ptr, Tensor.stride
_dtype, _is_sparse = attrgetter("dtype"), attrgetter("is_sparse")
