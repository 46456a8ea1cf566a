"""Allocate buffers for the Triton kernels, choose their grids, and launch them."""

# pyright: reportIndexIssue=false
# Kernels are launched with Triton's own syntax: the grid in brackets.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibrate_paper.ensemble._ops.conv import products, repack
from equilibrate_paper.ensemble._ops.conv.geometry import (
    Geometry,
    blocks,
    packed_shape,
    power_of_two,
)
from equilibrate_paper.ensemble._ops.side_stream import SideStream

BLOCK = 512
"""Entries that one program of the elementwise kernels handles; the value hardly matters."""
PIXELS = 64
"""Pixels that the spreading kernel handles at once; the value hardly matters."""
CHIP = 132
"""Programs that fill the chip: fixed, so that sums have the same order on every machine."""
PACKED_AT_ONCE = 4096
"""Images of a data set that one launch packs: few enough to count their entries in 32 bits."""


@dataclass(frozen=True)
class Tile:
    """Block shape of a matrix product, and how a program runs it."""

    m: int
    """Rows of a block."""
    k: int
    """Terms of the sum that are added at once."""
    warps: int
    """Warps of a program."""
    stages: int
    """Stages of Triton's software pipeline."""
    vector: int = 8
    """Entries read at once: loads of 16 bytes bypass the first-level cache, those of 8 use it."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the kernels and of Triton's launcher."""
        return {
            "BM": self.m, "BK": self.k, "VECTOR": self.vector,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


# Measured on an H200 with the layers of the paper's CNN, 16 replicas, in half precision and TF32.
# The other precisions need more registers and therefore smaller blocks.


def forward_tile(g: Geometry, precision: str) -> Tile:
    """Return the block shape of the forward product."""
    small = g.replicas * g.pooled < 128 * CHIP
    if precision == "fp16":
        if small:
            return Tile(m=64, k=64, warps=4, stages=4)
        if g.patch <= 192:
            return Tile(m=128, k=32, warps=4, stages=4, vector=4)
        large = g.replicas * g.pooled >= 512 * CHIP
        return Tile(m=128, k=32 if large else 64, warps=4, stages=3)
    if precision != "tf32" or small:
        return Tile(m=64, k=32, warps=4, stages=2)
    return Tile(m=128, k=32, warps=4, stages=2 if g.patch <= 192 else 4)


def weight_gradient_tile(g: Geometry, precision: str) -> tuple[Tile, int]:
    """Return the block shape of the weight gradient, and the number of partial sums of a replica.

    With fewer than four warps Triton uses the older matrix instructions, which read operands of
    any width in any order. The newer ones need 32-bit operands transposed, which costs a slow
    fence.
    """
    if precision == "fp16" and g.patch <= 256 and g.outputs <= 16:
        tile, programs = Tile(m=64, k=256, warps=8, stages=5, vector=4), CHIP
    elif precision == "fp16":
        tile, programs = Tile(m=64, k=128, warps=4, stages=3), 2 * CHIP
    elif precision == "tf32":
        tile, programs = Tile(m=16, k=64, warps=2, stages=3), 6 * CHIP
    else:
        tile, programs = Tile(m=16, k=64, warps=8, stages=1), 4 * CHIP
    splits = programs // (g.replicas * blocks(g.patch, tile.k))
    return tile, min(max(1, splits), 32)


def input_gradient_tile(g: Geometry, precision: str) -> Tile:
    """Return the block shape of the input gradient."""
    small = g.replicas * g.pooled < 128 * CHIP
    if precision == "fp16" and small:
        return Tile(m=64, k=64, warps=4, stages=4)
    if precision == "fp16":
        return Tile(m=128, k=64, warps=4, stages=3)
    if precision == "tf32":
        return Tile(m=64 if small else 128, k=32, warps=4, stages=3)
    return Tile(m=64, k=16, warps=8, stages=2)


_SIDE_STREAM = SideStream()


def _rows_contiguous(parameter: Tensor) -> Tensor:
    """Return the parameter with the part of each replica contiguous, as in a slice of θ."""
    return parameter if parameter[0].is_contiguous() else parameter.contiguous()


def element_type(precision: str) -> torch.dtype:
    """Return the data type of packed images, filters and spread gradients."""
    return torch.float16 if precision == "fp16" else torch.float32


def _product(precision: str) -> str:
    """Return how Triton multiplies the elements."""
    return "ieee" if precision == "fp16" else precision


def pack(x: Tensor, width: int, precision: str) -> Tensor:
    """Return images in the layout that the products read.

    The layout has channels last, is rounded to the precision, and has a border of zeros for filters
    of `width`. The images are (R, B, C, H, W).
    """
    shape = packed_shape(tuple(x.shape[:2]), tuple(x.shape[-3:]), width)
    packed = x.new_empty(shape, dtype=element_type(precision))
    _pack(packed, x, width, precision)
    return packed


def pack_data_set(images: Tensor, width: int, precision: str) -> Tensor:
    """Return a data set (N, C, H, W) in the layout that the products read."""
    shape = packed_shape((len(images),), tuple(images.shape[1:]), width)
    packed = images.new_empty(shape, dtype=element_type(precision))
    for some, x in zip(packed.split(PACKED_AT_ONCE), images.split(PACKED_AT_ONCE), strict=True):
        _pack(some[None], x[None], width, precision)
    return packed


def _pack(packed: Tensor, x: Tensor, width: int, precision: str) -> None:
    size = packed[0].numel()
    repack.pack_kernel[(blocks(size, 2 * BLOCK), len(packed))](
        x, packed, x.stride(0), x.stride(-4), size,
        STRIDE_C=x.stride(-3), STRIDE_Y=x.stride(-2), STRIDE_X=x.stride(-1),
        C=x.shape[-3], CP=packed.shape[-1], H=x.shape[-2], W=x.shape[-1], PAD=width // 2,
        ROUND=precision == "tf32", BLOCK=2 * BLOCK,
    )  # fmt: skip


@dataclass(frozen=True)
class Images:
    """Packed images as the kernels take them."""

    packed: Tensor
    """Images of each replica, (R, B, …), or a data set for all, (N, …)."""
    index: Tensor | None
    """Indices into the data set, (R, B), or None to use the images in their order."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the kernels."""
        shared = self.packed.ndim == 4
        index = self.index
        if index is not None and index.stride(1) != 1:
            index = index.contiguous()
        return {
            "packed": self.packed,
            "index": index,
            "stride_packed": 0 if shared else self.packed.stride(0),
            "stride_index": 0 if index is None else index.stride(0),
        }


def forward(
    images: Images,
    weight: Tensor,
    bias: Tensor,
    g: Geometry,
    precision: str,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return pooled outputs, and the position of each maximum (4 where the ReLU is zero)."""
    tile = tile or forward_tile(g, precision)
    main, tail = g.output_blocks
    columns, depth = 4 * (main + tail), blocks(g.patch, tile.k) * tile.k
    weight, bias = _rows_contiguous(weight), _rows_contiguous(bias)
    filters = images.packed.new_empty(g.replicas, columns, depth)
    y = weight.new_empty(g.pooled_shape)
    argmax = weight.new_empty(g.pooled_shape, dtype=torch.uint8)
    repack.expand_filters_kernel[(blocks(columns * depth, BLOCK), g.replicas)](
        weight, filters, weight.stride(0),
        O=g.outputs, O_MAIN=main, O_TAIL=tail, C=g.channels, CP=g.padded_channels, F=g.filter,
        KP=depth, ROUND=precision == "tf32", BLOCK=BLOCK,
    )  # fmt: skip
    products.forward_kernel[(blocks(g.pooled, tile.m), g.replicas)](
        **images.arguments, filters=filters, bias=bias, y=y, argmax=argmax,
        stride_bias=bias.stride(0), M=g.pooled,
        O=g.outputs, O_MAIN=main, O_TAIL=tail, CP=g.padded_channels,
        H=g.height, W=g.width, F=g.filter, KP=depth,
        PRECISION=_product(precision), **tile.options,
    )  # fmt: skip
    return y, argmax


def weight_gradient(
    images: Images, grad: Tensor, argmax: Tensor, g: Geometry, precision: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias."""
    spread, sums = spread_gradient(grad, argmax, g, precision, border=0)
    product = WeightGradient(images, spread, sums, g, precision)
    product.launch()
    return product.weight, product.bias


def gradients(
    images: Images, grad: Tensor, argmax: Tensor, weight: Tensor, g: Geometry, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the images (channels last), weight and bias."""
    inward = InputGradient(weight, g, precision)
    with _SIDE_STREAM.use(grad.device):
        inward.expand()
    spread, sums = spread_gradient(grad, argmax, g, precision, border=g.reach)
    _SIDE_STREAM.join(grad.device)
    product = WeightGradient(images, spread, sums, g, precision)
    with _SIDE_STREAM.use(grad.device):
        product.launch()
    inward.launch(spread)
    _SIDE_STREAM.join(grad.device)
    return inward.x, product.weight, product.bias


def _scale(g: Geometry, precision: str) -> float:
    return g.scale if precision == "fp16" else 1.0


def spread_gradient(
    grad: Tensor, argmax: Tensor, g: Geometry, precision: str, border: int
) -> tuple[Tensor, Tensor]:
    """Return gradients in the layout that the products read, and partial sums of the bias gradient.

    Each gradient is at the position of its maximum, with 0 at the three other positions. Each image
    has a border of zeros.
    """
    main, tail = g.output_blocks
    height, width = g.height // 2, g.width // 2
    spread = grad.new_empty(
        (g.replicas, g.batch, height + 2 * border, width + 2 * border, 4 * (main + tail)),
        dtype=element_type(precision),
    )
    pixels = spread[0, ..., 0].numel()
    steps = 4 if g.replicas * pixels >= 4 * PIXELS * CHIP else 1
    sums = grad.new_empty(g.replicas, blocks(pixels, PIXELS * steps), g.outputs)
    repack.spread_kernel[(sums.shape[1], g.replicas)](
        grad, argmax, spread, sums, grad.stride(0), grad.stride(1), _scale(g, precision), pixels,
        STRIDE_O=grad.stride(2), STRIDE_Y=grad.stride(3), STRIDE_X=grad.stride(4),
        O=g.outputs, O_MAIN=main, O_TAIL=tail, H2=height, W2=width,
        BORDER=border, ROUND=precision == "tf32", STEPS=steps, BLOCK=PIXELS,
    )  # fmt: skip
    return spread, sums


class WeightGradient:
    """Gradients of weight and bias: partial sums, then their sum in a fixed order."""

    def __init__(
        self,
        images: Images,
        spread: Tensor,
        sums: Tensor,
        g: Geometry,
        precision: str,
        tile: Tile | None = None,
        splits: int | None = None,
    ) -> None:
        if tile is None or splits is None:
            tile, splits = weight_gradient_tile(g, precision)
        self.images, self.spread, self.sums = images, spread, sums
        self.g, self.precision, self.tile = g, precision, tile
        self.steps = blocks(blocks(g.pooled, tile.m), splits)
        self.splits = blocks(g.pooled, self.steps * tile.m)
        self.partial = sums.new_empty(self.splits, g.replicas, g.patch, spread.shape[-1])
        self.weight = sums.new_empty(g.replicas, g.outputs, g.channels, g.filter, g.filter)
        self.bias = sums.new_empty(g.replicas, g.outputs)

    def launch(self) -> None:
        """Compute `weight` and `bias`."""
        self.multiply()
        self.fold()

    def multiply(self) -> None:
        """Compute the partial sums of the weight gradient."""
        g, tile = self.g, self.tile
        main, tail = g.output_blocks
        image, width = g.pooled // g.batch, g.width // 2
        whole = image % tile.m == 0 and tile.m % width == 0
        whole |= tile.m % image == 0 and self.images.index is None
        products.weight_gradient_kernel[(blocks(g.patch, tile.k), self.splits, g.replicas)](
            **self.images.arguments, spread=self.spread, partial=self.partial, M=g.pooled,
            O_MAIN=main, O_TAIL=tail, CP=g.padded_channels, H=g.height, W=g.width,
            F=g.filter, BORDER=(self.spread.shape[2] - g.height // 2) // 2, STEPS=self.steps,
            ALIGNED=whole and g.pooled % tile.m == 0,
            PRECISION=_product(self.precision), **tile.options,
        )  # fmt: skip

    def fold(self) -> None:
        """Add up the partial sums of weight and bias gradient."""
        g = self.g
        products.fold_kernel[(g.channels * g.filter + 1, g.replicas)](
            self.partial, self.sums, self.weight, self.bias, 1 / _scale(g, self.precision),
            O=g.outputs, OP=sum(g.output_blocks), OB=power_of_two(g.outputs),
            C=g.channels, CP=g.padded_channels, F=g.filter,
            SPLITS=self.splits, AT_ONCE=min(self.splits, 8), BIAS_SUMS=self.sums.shape[1],
            BLOCK=power_of_two(g.filter * g.outputs),
        )  # fmt: skip


class InputGradient:
    """Gradient of the images, channels last."""

    def __init__(
        self, weight: Tensor, g: Geometry, precision: str, tile: Tile | None = None
    ) -> None:
        self.given, self.g, self.precision = _rows_contiguous(weight), g, precision
        self.tile = tile or input_gradient_tile(g, precision)
        main, tail = g.channel_blocks
        columns = sum(g.output_blocks)
        depth = blocks((2 * g.reach + 1) ** 2 * 4 * columns, self.tile.k) * self.tile.k
        self.sizes: dict[str, Any] = {
            "OP": columns, "C": g.channels, "C_MAIN": main, "C_TAIL": tail,
            "REACH": g.reach, "KP": depth,
        }  # fmt: skip
        self.filters = weight.new_empty(
            g.replicas, 4 * (main + tail), depth, dtype=element_type(precision)
        )
        self.x = weight.new_empty(g.image_shape)

    def expand(self) -> None:
        """Lay out the weights as the product reads them."""
        g = self.g
        repack.expand_transpose_kernel[(blocks(self.filters[0].numel(), BLOCK), g.replicas)](
            self.given, self.filters, self.given.stride(0),
            O=g.outputs, F=g.filter, ROUND=self.precision == "tf32", BLOCK=BLOCK, **self.sizes,
        )  # fmt: skip

    def launch(self, spread: Tensor) -> None:
        """Compute `x` from spread gradients with a border of `g.reach`."""
        g, tile = self.g, self.tile
        products.input_gradient_kernel[(blocks(g.pooled, tile.m), g.replicas)](
            self.filters, spread, self.x, g.pooled, 1 / _scale(g, self.precision),
            H=g.height, W=g.width, PRECISION=_product(self.precision),
            **self.sizes, **tile.options,
        )  # fmt: skip
