"""Convolution, bias, ReLU and 2×2 max-pooling of many small networks at once, in Triton kernels.

An ensemble of R small CNNs spends its time in grouped convolutions. `conv_relu_pool` computes one
layer of all R replicas. Its backward pass uses that only the pooled maxima carry a gradient.
`plain.conv_relu_pool` is the same function in plain PyTorch, which the tests compare.
"""

from typing import Any, cast

import torch
from torch import Tensor

from equilibrate_paper.ensemble._ops.conv import launch
from equilibrate_paper.ensemble._ops.conv.geometry import Geometry
from equilibrate_paper.ensemble.examples import IndexedInputs, PackedImages
from equilibrate_paper.ensemble.precision import ConvPrecision

__all__ = ["conv_relu_pool", "pack_images"]

_LIMITS = {"channels": 32, "outputs": 32, "filter": 7}
"""Largest sizes whose blocks fit on the chip."""


def conv_relu_pool(
    x: Tensor | IndexedInputs, weight: Tensor, bias: Tensor, precision: ConvPrecision
) -> Tensor:
    """Compute one CNN layer of R replicas: convolution (stride 1, "same"), bias, ReLU, max-pooling.

    The result is
    y[r, b, o, i, j] = max(0, max_{p ∈ {0,1}²} (w_{r,o} ⋆ x_{r,b} + b_{r,o})[2i + p_y, 2j + p_x]),
    differentiable once with respect to all three tensors. As in torch, the gradient goes to the
    first of equal maxima, and is zero where the ReLU is. Results are reproducible bit for bit. A
    NaN or an infinity in x spreads over the 2×2 windows that contain it.

    Args:
        x: Images, (R, B, C, H, W), of even height and width, or indices into a data set that
            `pack_images` has packed for filters of this width in this precision.
        weight: Filters, (R, O, C, F, F), of odd width.
        bias: Biases, (R, O).
        precision: Precision of the products.

    Returns:
        Pooled outputs, (R, B, O, H//2, W//2).

    Raises:
        ValueError: If a size is above what the kernels support.
    """
    _, outputs, channels, _, width = weight.shape
    for name, size in (("channels", channels), ("outputs", outputs), ("filter", width)):
        if size > _LIMITS[name]:
            raise ValueError(f"{name} {size} is above {_LIMITS[name]}: use PlainOps()")
    if isinstance(x, IndexedInputs):
        packed = cast(PackedImages, x.data).packed
        return cast(Tensor, _Layer.apply(None, packed, weight, bias, x.index, precision))
    packed = launch.pack(x.detach(), width, precision)
    return cast(Tensor, _Layer.apply(x, packed, weight, bias, None, precision))


def pack_images(images: Tensor, width: int, precision: ConvPrecision) -> PackedImages:
    """Lay out a data set once for a first layer, instead of at every step.

    Args:
        images: The images, (N, C, H, W).
        width: Width of the filters of the first layer.
        precision: Precision of the products of the first layer.

    Returns:
        The images and their copy in the layout that the kernels read.
    """
    return PackedImages(images, launch.pack_data_set(images, width, precision))


class _Layer(torch.autograd.Function):
    """The layer, computed from `packed`; the gradient goes to x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | None,
        packed: Tensor,
        weight: Tensor,
        bias: Tensor,
        index: Tensor | None,
        precision: ConvPrecision,
    ) -> Tensor:
        g = Geometry.from_packed(weight, packed, index)
        y, argmax = launch.forward(launch.Images(packed, index), weight, bias, g, precision)
        ctx.save_for_backward(packed, weight, index, argmax)
        ctx.precision = precision
        return _channels_first(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        [grad] = grads
        packed, weight, index, argmax = ctx.saved_tensors
        g, images = Geometry.of(weight, grad), launch.Images(packed, index)
        if not ctx.needs_input_grad[0]:
            rest = launch.weight_gradient(images, grad, argmax, g, ctx.precision)
            return None, None, *rest, None, None
        grad_x, *rest = launch.gradients(images, grad, argmax, weight, g, ctx.precision)
        return _channels_first(grad_x), None, *rest, None, None


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3)
