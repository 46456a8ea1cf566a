"""Convolution, bias, ReLU and 2×2 max-pooling of many small networks at once, in Triton kernels.

An ensemble of R small CNNs spends its time in grouped convolutions. `conv_relu_pool` computes one
layer of all R replicas. Its backward pass uses that only the pooled maxima carry a gradient.
`plain.grouped_conv_relu_pool` is the same function in plain PyTorch: the tests compare the two, and
it computes what the kernels do not support.
"""

from typing import Any, cast, get_args

import torch
from torch import Tensor

from equilibrate_paper.ensemble._ops import plain
from equilibrate_paper.ensemble._ops.conv import launch
from equilibrate_paper.ensemble._ops.conv.geometry import Geometry, packed_shape
from equilibrate_paper.ensemble.data.examples import PackedImages, PreparedInputs
from equilibrate_paper.ensemble.precision import ConvPrecision

__all__ = ["conv_relu_pool", "pack_images", "why_unsupported"]

_PRECISIONS = get_args(ConvPrecision)
_LIMITS = {"channels": 32, "outputs": 32, "filter": 7}
"""Largest sizes whose blocks fit on the chip."""


def conv_relu_pool(
    x: PreparedInputs,
    weight: Tensor,
    bias: Tensor,
    *,
    index: Tensor | None = None,
    precision: ConvPrecision = "tf32",
) -> Tensor:
    """Compute one CNN layer of R replicas: convolution (stride 1, "same"), bias, ReLU, max-pooling.

    The result is
    y[r, b, o, i, j] = max(0, max_{p ∈ {0,1}²} (w_{r,o} ⋆ x_{r,b} + b_{r,o})[2i + p_y, 2j + p_x]),
    differentiable once with respect to all three tensors. As in torch, the gradient goes to the
    first of equal maxima, and is zero where the ReLU is. Results are reproducible bit for bit. A
    NaN or an infinity in x spreads over the 2×2 windows that contain it.

    Operands that the kernels do not support are passed to `plain.grouped_conv_relu_pool`, which
    uses the precision set in torch; `why_unsupported` gives the reason.

    Args:
        x: Images, (R, B, C, H, W). Images shared by all replicas are passed as `x.expand(R, …)`.
            With an index, or packed by `pack_images`, a data set, (N, C, H, W).
        weight: Filters, (R, O, C, F, F).
        bias: Biases, (R, O).
        index: Indices into the data set, (R, B): replica r sees x[index[r]]. Without an index
            every replica sees all of a packed data set.
        precision: Precision of the products.

    Returns:
        Pooled outputs, (R, B, O, H//2, W//2).
    """
    _check_precision(precision)
    if isinstance(x, PackedImages):
        _check_shapes(x.images, weight, bias, index, is_data_set=True)
        _check_packed(x, weight, precision)
    else:
        _check_shapes(x, weight, bias, index, is_data_set=index is not None)
    if why_unsupported(x, weight, bias) is not None:
        return plain.grouped_conv_relu_pool(x, weight, bias, index=index)
    if isinstance(x, PackedImages):
        return cast(Tensor, _forward(None, x.packed, weight, bias, index, precision)[0])
    if index is not None and x.requires_grad:
        x, index = x[index], None  # autograd then adds up the gradients of repeated images
    packed = _pack(x.detach(), index, weight.shape[-1], precision)
    return cast(Tensor, _forward(x, packed, weight, bias, None, precision)[0])


def pack_images(images: Tensor, width: int, precision: ConvPrecision = "tf32") -> PackedImages:
    """Lay out a data set once for a first layer, instead of at every step.

    Args:
        images: The images, (N, C, H, W).
        width: Width of the filters of the first layer.
        precision: Precision of the products of the first layer.

    Returns:
        The images and their copy in the layout that the kernels read.

    Raises:
        ValueError: If the images or filters of this width are not supported.
    """
    _check_precision(precision)
    if images.ndim != 4:
        raise ValueError(f"images must be (N, C, H, W), got {tuple(images.shape)}")
    if images.requires_grad:
        raise ValueError("images must not require a gradient: pass them to conv_relu_pool unpacked")
    if width % 2 == 0:
        raise ValueError(f"width must be odd, got {width}")
    reason = _why_unsupported(images, width)
    if reason is not None:
        raise ValueError(
            f"images cannot be packed, since {reason}: pass them to conv_relu_pool unpacked"
        )
    return PackedImages(images, launch.pack_data_set(images, width, precision), width, precision)


def why_unsupported(x: PreparedInputs, weight: Tensor, bias: Tensor) -> str | None:
    """Explain why the kernels do not support these operands.

    Args:
        x: Images or a data set, (…, C, H, W).
        weight: Filters, (R, O, C, F, F).
        bias: Biases, (R, O).

    Returns:
        The reason, or None if the operands are supported.

    Example:
        >>> why_unsupported(torch.ones(1, 1, 1, 3, 4), torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1))
        'height 3 is odd'
    """
    images = x.images if isinstance(x, PackedImages) else x
    if weight.shape[1] > _LIMITS["outputs"]:
        return f"outputs {weight.shape[1]} is above {_LIMITS['outputs']}"
    if any(t.dtype != torch.float32 for t in (images, weight, bias)):
        return f"dtypes are {images.dtype}, {weight.dtype}, {bias.dtype}, not float32"
    return _why_unsupported(images, weight.shape[-1])


def _why_unsupported(images: Tensor, width: int) -> str | None:
    for name, size in (("channels", images.shape[-3]), ("filter", width)):
        if size > _LIMITS[name]:
            return f"{name} {size} is above {_LIMITS[name]}"
    for name, size in (("height", images.shape[-2]), ("width", images.shape[-1])):
        if size % 2:
            return f"{name} {size} is odd"
    if images.dtype != torch.float32:
        return f"images are {images.dtype}, not float32"
    return None


def _check_precision(precision: str) -> None:
    if precision not in _PRECISIONS:
        known = ", ".join(map(repr, _PRECISIONS))
        raise ValueError(f"precision must be one of {known}, got {precision!r}")


def _check_packed(x: PackedImages, weight: Tensor, precision: str) -> None:
    if (x.width, x.precision) != (weight.shape[-1], precision):
        raise ValueError(
            f"images were packed for filters of width {x.width} in {x.precision}, but these are "
            f"{weight.shape[-1]} wide in {precision}: pack them again with pack_images"
        )


def _check_shapes(
    x: Tensor, weight: Tensor, bias: Tensor, index: Tensor | None, *, is_data_set: bool
) -> None:
    expected = "(N, C, H, W)" if is_data_set else "(R, B, C, H, W)"
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}"
    if x.ndim != expected.count(",") + 1 or weight.ndim != 5 or bias.ndim != 2:
        raise ValueError(
            f"x must be {expected}, weight (R, O, C, F, F) and bias (R, O), got {shapes}"
        )
    replicas, outputs, channels, rows, columns = weight.shape
    if x.shape[-3] != channels or bias.shape != (replicas, outputs):
        raise ValueError(f"C or (R, O) differ between x {expected}, weight and bias: {shapes}")
    if not is_data_set and x.shape[0] != replicas:
        raise ValueError(f"R differs between x and weight: {shapes}")
    if index is not None and (index.ndim != 2 or index.shape[0] != replicas):
        raise ValueError(f"index must be (R, B) with R = {replicas}, got {tuple(index.shape)}")
    if rows != columns or rows % 2 == 0:
        raise ValueError(f"weight must have a square filter of odd width, got {rows}×{columns}")


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3)


# Custom operators, so that torch.compile does not trace into the kernels.


@torch.library.custom_op("equilibrate::pack", mutates_args=())
def _pack(x: Tensor, index: Tensor | None, width: int, precision: str) -> Tensor:
    return launch.pack(x, index, width, precision)


@torch.library.custom_op("equilibrate::conv_relu_pool", mutates_args=())
def _forward(
    x: Tensor | None,
    packed: Tensor,
    weight: Tensor,
    bias: Tensor,
    index: Tensor | None,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Return pooled outputs and positions of maxima from `packed`; the gradient goes to x."""
    g = Geometry.from_packed(weight, packed, index)
    images = launch.Images(packed, index)
    y, argmax = launch.forward(images, weight, bias, g, precision)
    return _channels_first(y), argmax


@torch.library.custom_op("equilibrate::conv_relu_pool_weight_gradient", mutates_args=())
def _weight_gradient(
    packed: Tensor,
    index: Tensor | None,
    grad: Tensor,
    argmax: Tensor,
    weight: Tensor,
    precision: str,
) -> tuple[Tensor, Tensor]:
    g, images = Geometry.of(weight, grad), launch.Images(packed, index)
    return launch.weight_gradient(images, grad, argmax, g, precision)


@torch.library.custom_op("equilibrate::conv_relu_pool_gradients", mutates_args=())
def _gradients(
    packed: Tensor, grad: Tensor, argmax: Tensor, weight: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    g, images = Geometry.of(weight, grad), launch.Images(packed, None)
    grad_x, grad_weight, grad_bias = launch.gradients(images, grad, argmax, weight, g, precision)
    return _channels_first(grad_x), grad_weight, grad_bias


@_pack.register_fake
def _(x: Tensor, index: Tensor | None, width: int, precision: str) -> Tensor:
    leading = x.shape[:2] if index is None else index.shape
    dtype = torch.float16 if precision == "fp16" else torch.float32
    return x.new_empty(packed_shape(tuple(leading), tuple(x.shape[-3:]), width), dtype=dtype)


@_forward.register_fake
def _(
    x: Tensor | None,
    packed: Tensor,
    weight: Tensor,
    bias: Tensor,
    index: Tensor | None,
    precision: str,
) -> tuple[Tensor, Tensor]:
    g = Geometry.from_packed(weight, packed, index)
    argmax = weight.new_empty(g.pooled_shape, dtype=torch.uint8)
    return _channels_first(weight.new_empty(g.pooled_shape)), argmax


@_weight_gradient.register_fake
def _(
    packed: Tensor,
    index: Tensor | None,
    grad: Tensor,
    argmax: Tensor,
    weight: Tensor,
    precision: str,
) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape), weight.new_empty(weight.shape[:2])


@_gradients.register_fake
def _(
    packed: Tensor, grad: Tensor, argmax: Tensor, weight: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = _channels_first(weight.new_empty(Geometry.of(weight, grad).image_shape))
    return grad_x, weight.new_empty(weight.shape), weight.new_empty(weight.shape[:2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, packed, weight, _, index, ctx.precision = inputs
    _, argmax = output
    ctx.mark_non_differentiable(argmax)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, argmax, packed, index)


def _backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    weight, argmax, packed, index = ctx.saved_tensors
    if ctx.needs_input_grad[0]:
        grad_x, *rest = _gradients(packed, grad, argmax, weight, ctx.precision)
    else:
        grad_x, rest = None, _weight_gradient(packed, index, grad, argmax, weight, ctx.precision)
    return grad_x, None, *rest, None, None


_forward.register_autograd(_backward, setup_context=_save)
