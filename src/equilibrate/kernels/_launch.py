"""Buffers, grids and streams of the Triton kernels (only imported where Triton is)."""

# pyright: reportIndexIssue=false
# A kernel is subscripted with its grid, which its type does not say where Triton is missing.

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import _products, _repack
from ._geometry import Geometry, blocks, power_of_two

BLOCK = 512
"""Entries a program of the elementwise kernels handles; its choice hardly matters."""
PIXELS = 128
"""Pixels a program of the repacking kernels handles; likewise."""
CHIP = 132
"""Programs that fill the chip: a fixed number, so that sums have one order on every machine."""


@dataclass(frozen=True)
class Tile:
    """Block shape of a matrix product and how a program runs it."""

    m: int
    k: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """What Triton's launcher wants to know."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# Measured on an H200 with the layers of the paper's CNN, 16 replicas, in TF32. The other
# precisions need more registers, hence smaller blocks.


def forward_tile(g: Geometry, precision: str) -> Tile:
    """Block shape of the forward product."""
    if precision != "tf32" or g.replicas * g.pooled < 128 * CHIP:
        return Tile(m=64, k=32, warps=4, stages=2)
    return Tile(m=128, k=32, warps=4, stages=2 if g.patch <= 192 else 4)


def weight_gradient_tile(g: Geometry, precision: str) -> tuple[Tile, int]:
    """Block shape of the weight gradient and into how many summands a replica's batch is split.

    With fewer than four warps Triton takes the older matrix instructions, which read operands in
    any order; the newer ones want one of them transposed, and a slow fence after that.
    """
    if precision != "tf32":
        tile, programs = Tile(m=16, k=64, warps=8, stages=1), 4 * CHIP
    elif g.outputs > 24:
        tile, programs = Tile(m=16, k=32, warps=2, stages=1), 8 * CHIP
    elif g.patch <= 192:
        tile, programs = Tile(m=16, k=64, warps=2, stages=1), 6 * CHIP
    elif g.pooled >= 4096:
        tile, programs = Tile(m=32, k=64, warps=2, stages=1), 8 * CHIP
    else:
        tile, programs = Tile(m=16, k=64, warps=2, stages=1), 3 * CHIP
    splits = programs // (g.replicas * blocks(g.patch, tile.k))
    return tile, min(max(1, splits), 32)


def input_gradient_tile(g: Geometry, precision: str) -> Tile:
    """Block shape of the input gradient (its k follows from the channels)."""
    if precision != "tf32":
        return Tile(m=64, k=16, warps=8, stages=2)
    if g.replicas * g.pooled < 128 * CHIP or g.channels * g.outputs > 512:
        return Tile(m=64, k=16, warps=4, stages=2)
    return Tile(m=128, k=16, warps=4, stages=3)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Launch on a second stream, after what is queued so far; `_join` waits for it.

    Two kernels side by side fill what each would leave idle. Memory is taken before, on the main
    stream, so that the allocator need not know of the second one.
    """
    if device.type != "cuda":
        yield
        return
    stream = _second_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def _join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_second_stream(device))


def _rows_contiguous(parameter: Tensor) -> Tensor:
    """The parameter of all replicas, each replica's part contiguous (a slice of θ is)."""
    return parameter if parameter[0].is_contiguous() else parameter.contiguous()


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    index: Tensor | None,
    g: Geometry,
    precision: str,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pooled activations, where each maximum sat (4: ReLU dead), and the packed images."""
    tile = tile or forward_tile(g, precision)
    main, tail = g.output_blocks
    columns, depth = 4 * (main + tail), blocks(g.patch, tile.k) * tile.k
    weight, bias = _rows_contiguous(weight), _rows_contiguous(bias)
    filters = x.new_empty(g.replicas, columns, depth)
    packed = x.new_empty(g.packed_shape)
    y = x.new_empty(g.pooled_shape)
    argmax = x.new_empty(g.pooled_shape, dtype=torch.uint8)
    with _beside(x.device):
        _repack.expand_filters_kernel[(blocks(columns * depth, BLOCK), g.replicas)](
            weight, filters, weight.stride(0),
            O=g.outputs, C=g.channels, CP=g.padded_channels, F=g.filter, N=columns, KP=depth,
            ROUND=precision == "tf32", BLOCK=BLOCK,
        )  # fmt: skip
    pixels = packed[0, ..., 0].numel()
    _repack.pack_kernel[(blocks(pixels, PIXELS), g.replicas)](
        x, None if index is None else index.contiguous(), packed,
        x.stride(0) if index is None else 0, x.stride(-4), pixels,
        STRIDE_C=x.stride(-3), STRIDE_Y=x.stride(-2), STRIDE_X=x.stride(-1),
        C=g.channels, CP=g.padded_channels, CB=power_of_two(g.padded_channels),
        H=g.height, W=g.width, PAD=g.filter // 2, ROUND=precision == "tf32", BLOCK=PIXELS,
    )  # fmt: skip
    _join(x.device)
    _products.forward_kernel[(blocks(g.pooled, tile.m), g.replicas)](
        packed, filters, bias, y, argmax, bias.stride(0), g.pooled,
        O=g.outputs, O_MAIN=main, O_TAIL=tail, CP=g.padded_channels,
        H=g.height, W=g.width, F=g.filter, KP=depth, BM=tile.m, BK=tile.k, PRECISION=precision,
        **tile.options,
    )  # fmt: skip
    return y, argmax, packed


def weight_gradient(
    packed: Tensor, grad: Tensor, argmax: Tensor, g: Geometry, precision: str
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias."""
    tagged, sums = _tag(grad, argmax, g, precision, border=0)
    product = WeightGradient(packed, tagged, sums, g, precision)
    product.launch()
    return product.weight, product.bias


def gradients(
    packed: Tensor, grad: Tensor, argmax: Tensor, weight: Tensor, g: Geometry, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the images (channels last), weight and bias."""
    images = InputGradient(weight, g, precision)
    with _beside(grad.device):
        images.expand()
    tagged, sums = _tag(grad, argmax, g, precision, border=g.reach)
    _join(grad.device)
    product = WeightGradient(packed, tagged, sums, g, precision)
    with _beside(grad.device):
        product.launch()
    images.launch(tagged)
    _join(grad.device)
    return images.x, product.weight, product.bias


def _tag(
    grad: Tensor, argmax: Tensor, g: Geometry, precision: str, border: int
) -> tuple[Tensor, Tensor]:
    """Gradients as the products read them, and summands of the bias gradient.

    Each gradient carries its maximum's position; around each image lies a border of zeros.
    """
    channels = sum(g.output_blocks)
    height, width = g.height // 2, g.width // 2
    tagged = grad.new_empty(g.replicas, g.batch, height + 2 * border, width + 2 * border, channels)
    pixels = tagged[0, ..., 0].numel()
    sums = grad.new_empty(g.replicas, blocks(pixels, PIXELS), g.outputs)
    _repack.tag_kernel[(sums.shape[1], g.replicas)](
        grad, argmax, tagged, sums, grad.stride(0), grad.stride(1), pixels,
        STRIDE_O=grad.stride(2), STRIDE_Y=grad.stride(3), STRIDE_X=grad.stride(4),
        O=g.outputs, OP=channels, OB=power_of_two(channels), H2=height, W2=width,
        BORDER=border, ROUND=precision == "tf32", BLOCK=PIXELS,
    )  # fmt: skip
    return tagged, sums


class WeightGradient:
    """Gradients of weight and bias: partial sums, then their sum in a fixed order."""

    def __init__(
        self,
        packed: Tensor,
        tagged: Tensor,
        sums: Tensor,
        g: Geometry,
        precision: str,
        tile: Tile | None = None,
        splits: int | None = None,
    ) -> None:
        if tile is None or splits is None:
            tile, splits = weight_gradient_tile(g, precision)
        self.packed, self.tagged, self.sums = packed, tagged, sums
        self.g, self.precision, self.tile = g, precision, tile
        self.main, self.tail = g.output_blocks
        self.steps = blocks(blocks(g.pooled, tile.m), splits)
        self.splits = blocks(g.pooled, self.steps * tile.m)
        columns = 4 * (self.main + self.tail)
        self.partial = packed.new_empty(self.splits, g.replicas, g.patch, columns)
        self.weight = packed.new_empty(g.replicas, g.outputs, g.channels, g.filter, g.filter)
        self.bias = packed.new_empty(g.replicas, g.outputs)

    def launch(self) -> None:
        """Fill `weight` and `bias`."""
        g, tile = self.g, self.tile
        image, width = g.pooled // g.batch, g.width // 2
        whole = tile.m % image == 0 or (image % tile.m == 0 and tile.m % width == 0)
        _products.weight_gradient_kernel[(blocks(g.patch, tile.k), self.splits, g.replicas)](
            self.packed, self.tagged, self.partial, g.pooled,
            O_MAIN=self.main, O_TAIL=self.tail, CP=g.padded_channels, H=g.height, W=g.width,
            F=g.filter, BORDER=(self.tagged.shape[2] - g.height // 2) // 2, STEPS=self.steps,
            BM=tile.m, BK=tile.k, ALIGNED=whole and g.pooled % tile.m == 0,
            PRECISION=self.precision, **tile.options,
        )  # fmt: skip
        block = 128
        _products.fold_kernel[(blocks(self.weight[0].numel(), block), g.replicas)](
            self.partial, self.sums, self.weight, self.bias,
            O=g.outputs, O_MAIN=self.main, O_TAIL=self.tail, OB=power_of_two(g.outputs),
            C=g.channels, CP=g.padded_channels, F=g.filter,
            SPLITS=self.splits, SHARES=self.sums.shape[1], BLOCK=block,
        )  # fmt: skip


class InputGradient:
    """Gradient of the images, channels last."""

    def __init__(
        self, weight: Tensor, g: Geometry, precision: str, tile: Tile | None = None
    ) -> None:
        self.given, self.g, self.precision = _rows_contiguous(weight), g, precision
        self.tile = tile or input_gradient_tile(g, precision)
        main, tail = g.output_blocks
        channels_main, channels_tail = g.channel_blocks
        self.sizes: dict[str, Any] = {
            "O_MAIN": main, "O_TAIL": tail,
            "C": g.channels, "C_MAIN": channels_main, "C_TAIL": channels_tail, "REACH": g.reach,
        }  # fmt: skip
        depth = (2 * g.reach + 1) ** 2 * 4 * (main + tail)
        self.filters = weight.new_empty(g.replicas, 4 * (channels_main + channels_tail), depth)
        self.x = weight.new_empty(g.image_shape)

    def expand(self) -> None:
        """Lay the weights out as the product reads them."""
        g = self.g
        _repack.expand_transpose_kernel[(blocks(self.filters[0].numel(), BLOCK), g.replicas)](
            self.given, self.filters, self.given.stride(0),
            O=g.outputs, F=g.filter, ROUND=self.precision == "tf32", BLOCK=BLOCK, **self.sizes,
        )  # fmt: skip

    def launch(self, tagged: Tensor) -> None:
        """Fill `x`, from tagged gradients with a border of `g.reach`."""
        g, tile = self.g, self.tile
        _products.input_gradient_kernel[(blocks(g.pooled, tile.m), g.replicas)](
            self.filters, tagged, self.x, g.pooled,
            H=g.height, W=g.width, BM=tile.m, PRECISION=self.precision,
            **self.sizes, **tile.options,
        )  # fmt: skip
