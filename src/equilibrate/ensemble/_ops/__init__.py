"""Convolution + bias + ReLU + 2×2 max-pool of many small networks at once.

An ensemble of R small CNNs spends its time in grouped convolutions. `conv_relu_pool` does a layer
of all R replicas in Triton kernels made for it, whose backward pass uses that only the pooled
maxima carry gradient. `conv_relu_pool_reference` is the same function in plain torch: the twin it
is tested against, and what runs where Triton or the GPU is missing.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ._geometry import Geometry, packed_shape

__all__ = [
    "PackedImages",
    "Precision",
    "conv_relu_pool",
    "conv_relu_pool_reference",
    "pack_images",
    "why_not_fused",
]

Precision = Literal["fp16", "tf32", "tf32x3", "ieee"]
"""How products of float32 are formed; their sums, all results and gradients are float32.

`"tf32"` rounds factors to 11 bits, `"fp16"` to IEEE half: 11 bits as well, with half the memory
traffic and twice the speed of TF32's matrix units, but less range. `"tf32x3"` carries float32 by
three TF32 products, and `"ieee"` is plain FMA.

Range of `"fp16"`: images and weights from 6e-5 to 65504 keep 11 bits, smaller ones have an absolute
error of 3e-8 at most, larger ones become infinite, and with them results of that replica. The
gradient that comes in is multiplied, exactly, by s = 256·2^⌊log₂ B⌋, which later is taken out
again: the gradient of a mean over B images keeps 11 bits where an image's own one is between 5e-7
and 255. Entries from 65520/s on (4 for B = 100) become infinite, and the gradients of images and
weights with them, so that it shows; the bias gradient is always formed in float32. A loss that is
a sum, not a mean, should be divided by B first.
"""

HAS_TRITON = find_spec("triton") is not None
LIMITS = {"channels": 32, "outputs": 32, "filter": 7}
"""Largest sizes whose blocks the chip can hold."""


@dataclass(frozen=True)
class PackedImages:
    """A data set (N, C, H, W), and its copy in the layout that `conv_relu_pool` computes with.

    Made by `pack_images`, for filters of one width and one precision. `packed` is None where the
    kernels cannot run; then the plain images serve.
    """

    images: Tensor
    packed: Tensor | None
    width: int
    precision: Precision


def pack_images(images: Tensor, width: int, precision: Precision = "tf32") -> PackedImages:
    """Lay a data set out once for a first layer with filters of `width`, not at every step.

    >>> images = pack_images(torch.randn(7, 1, 6, 6), width=3)
    >>> index = torch.tensor([[6, 0], [1, 1]])
    >>> weight, bias = torch.randn(2, 5, 1, 3, 3), torch.zeros(2, 5)
    >>> conv_relu_pool(images, weight, bias, index=index).shape
    torch.Size([2, 2, 5, 3, 3])
    """
    _check_precision(precision)
    if images.ndim != 4:
        raise ValueError(f"images must be (N, C, H, W), got {tuple(images.shape)}")
    if images.requires_grad:
        raise ValueError(
            "images must not require a gradient: pass them to conv_relu_pool as they are"
        )
    if width % 2 == 0:
        raise ValueError(f"width must be odd, got {width}")
    fits = _why_not(images, width) is None
    return PackedImages(
        images, _packed(images, width, precision) if fits else None, width, precision
    )


def _packed(images: Tensor, width: int, precision: Precision) -> Tensor:
    from . import _launch

    return _launch.pack_data_set(images, width, precision)


def conv_relu_pool_reference(
    x: Tensor | PackedImages, weight: Tensor, bias: Tensor, *, index: Tensor | None = None
) -> Tensor:
    """Return max_pool2d(relu(conv2d(x[r], weight[r], bias[r], padding="same")), 2) for all r.

    >>> x, weight = torch.ones(2, 1, 1, 4, 4), torch.ones(2, 1, 1, 1, 1)
    >>> conv_relu_pool_reference(x, weight, torch.tensor([[1.0], [-3.0]])).flatten(1)
    tensor([[2., 2., 2., 2.],
            [0., 0., 0., 0.]])
    """
    if isinstance(x, PackedImages):
        x = x.images if index is not None else x.images.expand(len(weight), *x.images.shape)
    if index is not None:
        x = x[index]
    replicas, batch = x.shape[:2]
    images = x.transpose(0, 1).flatten(1, 2)
    y = F.conv2d(
        images, weight.flatten(0, 1), bias.flatten(), padding=weight.shape[-1] // 2, groups=replicas
    )
    y = F.max_pool2d(F.relu(y), 2)
    return y.reshape(batch, replicas, weight.shape[1], *y.shape[2:]).transpose(0, 1)


def why_not_fused(x: Tensor | PackedImages, weight: Tensor, bias: Tensor) -> str | None:
    """Say why the Triton kernels cannot take these operands, or None if they can.

    >>> why_not_fused(torch.ones(1, 1, 1, 3, 4), torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1))
    'height 3 is odd'
    """
    images = x.images if isinstance(x, PackedImages) else x
    if weight.shape[1] > LIMITS["outputs"]:
        return f"outputs {weight.shape[1]} is above {LIMITS['outputs']}"
    if any(t.dtype != torch.float32 for t in (images, weight, bias)):
        return f"dtypes are {images.dtype}, {weight.dtype}, {bias.dtype}, not float32"
    return _why_not(images, weight.shape[-1])


def _why_not(images: Tensor, width: int) -> str | None:
    for name, size in (("channels", images.shape[-3]), ("filter", width)):
        if size > LIMITS[name]:
            return f"{name} {size} is above {LIMITS[name]}"
    for name, size in (("height", images.shape[-2]), ("width", images.shape[-1])):
        if size % 2:
            return f"{name} {size} is odd"
    if images.dtype != torch.float32:
        return f"images are {images.dtype}, not float32"
    if not HAS_TRITON:
        return "triton is not installed"
    if not images.is_cuda:
        return f"x is on {images.device}, not on a CUDA device"
    return None


def _check_precision(precision: str) -> None:
    if precision not in get_args(Precision):
        known = ", ".join(map(repr, get_args(Precision)))
        raise ValueError(f"precision must be one of {known}, got {precision!r}")


def _check_packed(x: PackedImages, weight: Tensor, precision: str) -> None:
    if (x.width, x.precision) != (weight.shape[-1], precision):
        raise ValueError(
            f"images were packed for filters of width {x.width} in {x.precision}, but these are "
            f"{weight.shape[-1]} wide in {precision}: pack them anew with pack_images"
        )


def _check(x: Tensor, weight: Tensor, bias: Tensor, index: Tensor | None, is_set: bool) -> None:
    wanted = "(N, C, H, W)" if is_set else "(R, B, C, H, W)"
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}"
    if x.ndim != wanted.count(",") + 1 or weight.ndim != 5 or bias.ndim != 2:
        raise ValueError(f"want x {wanted}, weight (R, O, C, F, F), bias (R, O); got {shapes}")
    replicas, outputs, channels, rows, columns = weight.shape
    if x.shape[-3] != channels or bias.shape != (replicas, outputs):
        raise ValueError(f"C or (R, O) differ between x {wanted}, weight and bias: {shapes}")
    if not is_set and x.shape[0] != replicas:
        raise ValueError(f"R differs between x and weight: {shapes}")
    if index is not None and (index.ndim != 2 or index.shape[0] != replicas):
        raise ValueError(f"index must be (R, B) with R = {replicas}, got {tuple(index.shape)}")
    if rows != columns or rows % 2 == 0:
        raise ValueError(f"weight must have a square filter of odd width, got {rows}×{columns}")


def conv_relu_pool(
    x: Tensor | PackedImages,
    weight: Tensor,
    bias: Tensor,
    *,
    index: Tensor | None = None,
    precision: Precision = "tf32",
) -> Tensor:
    """One CNN layer of R replicas: convolution (stride 1, "same"), bias, ReLU, 2×2 max-pool.

    For x (R, B, C, H, W), weight (R, O, C, F, F) and bias (R, O), the result is
    y[r, b, o, i, j] = max(0, max_{p ∈ {0,1}²} (w_{r,o} ⋆ x_{r,b} + b_{r,o})[2i + p_y, 2j + p_x])
    of shape (R, B, O, H//2, W//2), differentiable once in all three. Images shared by all replicas
    are passed as `x.expand(R, …)`; with an `index` (R, B), x is a data set (N, C, H, W) and replica
    r sees x[index[r]]. A data set that `pack_images` made is read where it lies, through the index,
    or whole by every replica where there is none.

    Like torch, the gradient goes to the first of equal maxima, and nowhere if the ReLU is dead.
    Runs are reproducible bit for bit. A NaN or an infinity in x spreads over the 2×2 windows that
    see it.

    Operands the kernels cannot take go through `conv_relu_pool_reference`, in the precision torch
    is set to; `why_not_fused` says why.

    >>> x, weight, bias = torch.randn(2, 3, 1, 6, 6), torch.randn(2, 5, 1, 3, 3), torch.zeros(2, 5)
    >>> conv_relu_pool(x, weight, bias).shape
    torch.Size([2, 3, 5, 3, 3])
    """
    _check_precision(precision)
    if isinstance(x, PackedImages):
        _check(x.images, weight, bias, index, is_set=True)
        _check_packed(x, weight, precision)
    else:
        _check(x, weight, bias, index, is_set=index is not None)
    if why_not_fused(x, weight, bias) is not None:
        return conv_relu_pool_reference(x, weight, bias, index=index)
    return fused(x, weight, bias, index, precision)


def fused(
    x: Tensor | PackedImages,
    weight: Tensor,
    bias: Tensor,
    index: Tensor | None,
    precision: Precision,
) -> Tensor:
    """`conv_relu_pool` through the Triton kernels, whatever the device."""
    if isinstance(x, PackedImages):
        packed = _packed(x.images, x.width, precision) if x.packed is None else x.packed
        return cast(Tensor, _forward(None, packed, weight, bias, index, precision)[0])
    if index is not None and x.requires_grad:
        x, index = x[index], None  # so that autograd adds the gradients of repeated images up
    packed = _pack(x.detach(), index, weight.shape[-1], precision)
    return cast(Tensor, _forward(x, packed, weight, bias, None, precision)[0])


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3)


# Custom operators, so that torch.compile takes the kernels as they are.


@torch.library.custom_op("equilibrate::pack", mutates_args=())
def _pack(x: Tensor, index: Tensor | None, width: int, precision: str) -> Tensor:
    from . import _launch

    return _launch.pack(x, index, width, precision)


@torch.library.custom_op("equilibrate::conv_relu_pool", mutates_args=())
def _forward(
    x: Tensor | None,
    packed: Tensor,
    weight: Tensor,
    bias: Tensor,
    index: Tensor | None,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Read `packed`; x, where given, is what gets the gradient."""
    from . import _launch

    g = Geometry.before(weight, packed, index)
    images = _launch.Images(packed, index)
    y, argmax = _launch.forward(images, weight, bias, g, precision)
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
    from . import _launch

    g, images = Geometry.of(weight, grad), _launch.Images(packed, index)
    return _launch.weight_gradient(images, grad, argmax, g, precision)


@torch.library.custom_op("equilibrate::conv_relu_pool_gradients", mutates_args=())
def _gradients(
    packed: Tensor, grad: Tensor, argmax: Tensor, weight: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    from . import _launch

    g, images = Geometry.of(weight, grad), _launch.Images(packed, None)
    grad_x, grad_weight, grad_bias = _launch.gradients(images, grad, argmax, weight, g, precision)
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
    g = Geometry.before(weight, packed, index)
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
