"""Convolution + bias + ReLU + 2×2 max-pool of many small networks at once.

An ensemble of R small CNNs spends its time in grouped convolutions. `conv_relu_pool` does a layer
of all R replicas in Triton kernels made for it, whose backward pass uses that only the pooled
maxima carry gradient. `conv_relu_pool_reference` is the same function in plain torch: the twin it
is tested against, and what runs where Triton or the GPU is missing.
"""

from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ._geometry import Geometry

__all__ = ["Precision", "conv_relu_pool", "conv_relu_pool_reference", "why_not_fused"]

Precision = Literal["tf32", "tf32x3", "ieee"]
"""How products of float32 are formed: one TF32 product, three that carry float32, or plain FMA.

In the latter two the gradient that comes in is rounded to 22 bits.
"""

HAS_TRITON = find_spec("triton") is not None
LIMITS = {"channels": 32, "outputs": 32, "filter": 7}
"""Largest sizes whose blocks the chip can hold."""


def conv_relu_pool_reference(
    x: Tensor, weight: Tensor, bias: Tensor, *, index: Tensor | None = None
) -> Tensor:
    """Return max_pool2d(relu(conv2d(x[r], weight[r], bias[r], padding="same")), 2) for all r.

    >>> x, weight = torch.ones(2, 1, 1, 4, 4), torch.ones(2, 1, 1, 1, 1)
    >>> conv_relu_pool_reference(x, weight, torch.tensor([[1.0], [-3.0]])).flatten(1)
    tensor([[2., 2., 2., 2.],
            [0., 0., 0., 0.]])
    """
    if index is not None:
        x = x[index]
    replicas, batch = x.shape[:2]
    images = x.transpose(0, 1).flatten(1, 2)
    y = F.conv2d(
        images, weight.flatten(0, 1), bias.flatten(), padding=weight.shape[-1] // 2, groups=replicas
    )
    y = F.max_pool2d(F.relu(y), 2)
    return y.reshape(batch, replicas, weight.shape[1], *y.shape[2:]).transpose(0, 1)


def why_not_fused(x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Say why the Triton kernels cannot take these operands, or None if they can.

    >>> why_not_fused(torch.ones(1, 1, 1, 3, 4), torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1))
    'height 3 is odd'
    """
    sizes = {"channels": x.shape[-3], "outputs": weight.shape[1], "filter": weight.shape[-1]}
    for name, size in sizes.items():
        if size > LIMITS[name]:
            return f"{name} {size} is above {LIMITS[name]}"
    for name, size in (("height", x.shape[-2]), ("width", x.shape[-1])):
        if size % 2:
            return f"{name} {size} is odd"
    if any(t.dtype != torch.float32 for t in (x, weight, bias)):
        return f"dtypes are {x.dtype}, {weight.dtype}, {bias.dtype}, not float32"
    if not HAS_TRITON:
        return "triton is not installed"
    if not x.is_cuda:
        return f"x is on {x.device}, not on a CUDA device"
    return None


def _check(x: Tensor, weight: Tensor, bias: Tensor, index: Tensor | None, precision: str) -> None:
    if precision not in ("tf32", "tf32x3", "ieee"):
        raise ValueError(f"precision must be 'tf32', 'tf32x3' or 'ieee', got {precision!r}")
    wanted = "(R, B, C, H, W)" if index is None else "(N, C, H, W)"
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}"
    if x.ndim != wanted.count(",") + 1 or weight.ndim != 5 or bias.ndim != 2:
        raise ValueError(f"want x {wanted}, weight (R, O, C, F, F), bias (R, O); got {shapes}")
    replicas, outputs, channels, rows, columns = weight.shape
    if x.shape[-3] != channels or bias.shape != (replicas, outputs):
        raise ValueError(f"C or (R, O) differ between x {wanted}, weight and bias: {shapes}")
    if index is None and x.shape[0] != replicas:
        raise ValueError(f"R differs between x and weight: {shapes}")
    if index is not None and (index.ndim != 2 or index.shape[0] != replicas):
        raise ValueError(f"index must be (R, B) with R = {replicas}, got {tuple(index.shape)}")
    if rows != columns or rows % 2 == 0:
        raise ValueError(f"weight must have a square filter of odd width, got {rows}×{columns}")


def conv_relu_pool(
    x: Tensor,
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
    r sees x[index[r]]. Like torch, the gradient goes to the first of equal maxima, and nowhere if
    the ReLU is dead. Runs are reproducible bit for bit. A NaN or an infinity in x spreads over the
    2×2 windows that see it.

    Operands the kernels cannot take go through `conv_relu_pool_reference`, in the precision torch
    is set to; `why_not_fused` says why.

    >>> x, weight, bias = torch.randn(2, 3, 1, 6, 6), torch.randn(2, 5, 1, 3, 3), torch.zeros(2, 5)
    >>> conv_relu_pool(x, weight, bias).shape
    torch.Size([2, 3, 5, 3, 3])
    """
    _check(x, weight, bias, index, precision)
    if why_not_fused(x, weight, bias) is not None:
        return conv_relu_pool_reference(x, weight, bias, index=index)
    return fused(x, weight, bias, index, precision)


def fused(
    x: Tensor, weight: Tensor, bias: Tensor, index: Tensor | None, precision: Precision
) -> Tensor:
    """`conv_relu_pool` through the Triton kernels, whatever the device."""
    if index is not None and x.requires_grad:
        x, index = x[index], None  # so that autograd adds the gradients of repeated images up
    return cast(Tensor, _forward(x, weight, bias, index, precision)[0])


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3)


# Custom operators, so that torch.compile takes the kernels as they are.


@torch.library.custom_op("equilibrate::conv_relu_pool", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, index: Tensor | None, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    from . import _launch

    g = Geometry.before(weight, x, index)
    y, argmax, packed = _launch.forward(x, weight, bias, index, g, precision)
    return _channels_first(y), argmax, packed


@torch.library.custom_op("equilibrate::conv_relu_pool_weight_gradient", mutates_args=())
def _weight_gradient(
    packed: Tensor, grad: Tensor, argmax: Tensor, weight: Tensor, precision: str
) -> tuple[Tensor, Tensor]:
    from . import _launch

    return _launch.weight_gradient(packed, grad, argmax, Geometry.of(weight, grad), precision)


@torch.library.custom_op("equilibrate::conv_relu_pool_gradients", mutates_args=())
def _gradients(
    packed: Tensor, grad: Tensor, argmax: Tensor, weight: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    from . import _launch

    g = Geometry.of(weight, grad)
    grad_x, grad_weight, grad_bias = _launch.gradients(packed, grad, argmax, weight, g, precision)
    return _channels_first(grad_x), grad_weight, grad_bias


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, index: Tensor | None, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    g = Geometry.before(weight, x, index)
    argmax = x.new_empty(g.pooled_shape, dtype=torch.uint8)
    return _channels_first(x.new_empty(g.pooled_shape)), argmax, x.new_empty(g.packed_shape)


@_weight_gradient.register_fake
def _(
    packed: Tensor, grad: Tensor, argmax: Tensor, weight: Tensor, precision: str
) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape), weight.new_empty(weight.shape[:2])


@_gradients.register_fake
def _(
    packed: Tensor, grad: Tensor, argmax: Tensor, weight: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = _channels_first(weight.new_empty(Geometry.of(weight, grad).image_shape))
    return grad_x, weight.new_empty(weight.shape), weight.new_empty(weight.shape[:2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, _, _, ctx.precision = inputs
    _, argmax, packed = output
    ctx.mark_non_differentiable(argmax, packed)
    ctx.set_materialize_grads(False)  # `packed` is large
    ctx.save_for_backward(weight, argmax, packed)


def _backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    weight, argmax, packed = ctx.saved_tensors
    operands = (packed, grad, argmax, weight, ctx.precision)
    if ctx.needs_input_grad[0]:
        return *_gradients(*operands), None, None
    return None, *_weight_gradient(*operands), None, None


_forward.register_autograd(_backward, setup_context=_save)
