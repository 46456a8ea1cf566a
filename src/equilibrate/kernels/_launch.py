"""Shapes, buffers and grids of the Triton kernels (only imported where Triton is)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _triton as kernels
from ._geometry import Geometry, main_and_tail

BLOCK = 512
"""Entries a program of the elementwise kernels handles; its choice hardly matters."""


@dataclass(frozen=True)
class Tile:
    """Block shape of a matrix product and how a program runs it."""

    m: int
    k: int
    warps: int
    stages: int


def forward_tile(g: Geometry) -> Tile:
    """Block shape of the forward product."""
    return Tile(m=128, k=32, warps=4, stages=2)


def weight_gradient_tile(g: Geometry) -> tuple[Tile, int]:
    """Block shape of the weight gradient and into how many summands a replica's batch is split."""
    return Tile(m=64, k=64, warps=4, stages=2), 8


def input_gradient_tile(g: Geometry) -> Tile:
    """Block shape of the input gradient (its k follows from the channels)."""
    return Tile(m=128, k=0, warps=4, stages=2)


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def _options(tile: Tile) -> dict[str, Any]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def pack(x: Tensor, g: Geometry, precision: str) -> Tensor:
    """Images as the products read them: channels last, a border of zeros, rounded for TF32."""
    packed = x.new_empty(g.packed_shape)
    pixels = packed[0, ..., 0].numel()
    kernels.pack_kernel[(_blocks(pixels, 128), g.replicas)](
        x, packed, *x.stride(), pixels,
        C=g.channels, CP=g.padded_channels, CB=1 << (g.padded_channels - 1).bit_length(),
        H=g.height, W=g.width, PAD=g.filter // 2, ROUND=precision == "tf32", BLOCK=128,
    )  # fmt: skip
    return packed


def _channels_last(grad: Tensor) -> Tensor:
    return grad.permute(0, 1, 3, 4, 2).contiguous()


def _inner_contiguous(weight: Tensor) -> Tensor:
    return weight if weight[0].is_contiguous() else weight.contiguous()


def forward(
    packed: Tensor,
    weight: Tensor,
    bias: Tensor,
    g: Geometry,
    precision: str,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Pooled activations and where each maximum sat (4: ReLU dead), both channels last."""
    tile = tile or forward_tile(g)
    main, tail = main_and_tail(g.outputs)
    columns, depth = 4 * (main + tail), _blocks(g.patch, tile.k) * tile.k
    filters = packed.new_empty(g.replicas, columns, depth)
    weight = _inner_contiguous(weight)
    kernels.expand_filters_kernel[(_blocks(columns * depth, BLOCK), g.replicas)](
        weight, filters, weight.stride(0),
        O=g.outputs, C=g.channels, CP=g.padded_channels, F=g.filter, N=columns, KP=depth,
        ROUND=precision == "tf32", BLOCK=BLOCK,
    )  # fmt: skip
    y = packed.new_empty(g.pooled_shape)
    argmax = torch.empty(g.pooled_shape, dtype=torch.uint8, device=packed.device)
    bias = _inner_contiguous(bias)
    kernels.forward_kernel[(_blocks(g.pooled, tile.m), g.replicas)](
        packed, filters, bias, y, argmax, bias.stride(0), g.pooled,
        O=g.outputs, O_MAIN=main, O_TAIL=tail, CP=g.padded_channels,
        H=g.height, W=g.width, F=g.filter, KP=depth, BM=tile.m, BK=tile.k, PRECISION=precision,
        **_options(tile),
    )  # fmt: skip
    return y, argmax


def weight_gradient(
    packed: Tensor,
    grad: Tensor,
    argmax: Tensor,
    g: Geometry,
    precision: str,
    tile: Tile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias: partial sums, then their sum in a fixed order."""
    if tile is None or splits is None:
        tile, splits = weight_gradient_tile(g)
    main, tail = main_and_tail(g.outputs)
    steps = _blocks(_blocks(g.pooled, tile.m), splits)
    splits = _blocks(g.pooled, steps * tile.m)
    partial = packed.new_empty(splits, g.replicas, g.patch, 4 * (main + tail))
    partial_bias = packed.new_empty(splits, g.replicas, 4 * (main + tail))
    kernels.weight_gradient_kernel[(_blocks(g.patch, tile.k), splits, g.replicas)](
        packed, _channels_last(grad), argmax, partial, partial_bias, g.pooled,
        O=g.outputs, O_MAIN=main, O_TAIL=tail, CP=g.padded_channels,
        H=g.height, W=g.width, F=g.filter, STEPS=steps, BM=tile.m, BK=tile.k,
        ROUND=precision == "tf32", PRECISION=precision, **_options(tile),
    )  # fmt: skip
    grad_weight = packed.new_empty(g.replicas, g.outputs, g.channels, g.filter, g.filter)
    grad_bias = packed.new_empty(g.replicas, g.outputs)
    block = 128
    kernels.fold_kernel[(_blocks(grad_weight[0].numel(), block), g.replicas)](
        partial, partial_bias, grad_weight, grad_bias,
        O=g.outputs, O_MAIN=main, O_TAIL=tail, C=g.channels, CP=g.padded_channels, F=g.filter,
        SPLITS=splits, BLOCK=block,
    )  # fmt: skip
    return grad_weight, grad_bias


def input_gradient(
    weight: Tensor,
    grad: Tensor,
    argmax: Tensor,
    g: Geometry,
    precision: str,
    tile: Tile | None = None,
) -> Tensor:
    """Gradient of the images, channels last."""
    tile = tile or input_gradient_tile(g)
    main, tail = main_and_tail(g.outputs)
    channels_main, channels_tail = main_and_tail(g.channels)
    columns = 4 * (channels_main + channels_tail)
    depth = (2 * g.reach + 1) ** 2 * 4 * (main + tail)
    blocks: dict[str, Any] = dict(
        O=g.outputs, O_MAIN=main, O_TAIL=tail,
        C=g.channels, C_MAIN=channels_main, C_TAIL=channels_tail,
        REACH=g.reach, ROUND=precision == "tf32",
    )  # fmt: skip
    filters = weight.new_empty(g.replicas, columns, depth)
    weight = _inner_contiguous(weight)
    kernels.expand_transpose_kernel[(_blocks(columns * depth, BLOCK), g.replicas)](
        weight, filters, weight.stride(0), F=g.filter, BLOCK=BLOCK, **blocks
    )
    grad_x = weight.new_empty(g.image_shape)
    kernels.input_gradient_kernel[(_blocks(g.pooled, tile.m), g.replicas)](
        filters, _channels_last(grad), argmax, grad_x, g.pooled,
        H=g.height, W=g.width, BM=tile.m, PRECISION=precision, **blocks, **_options(tile),
    )  # fmt: skip
    return grad_x
