"""The fused layer against its plain twin: on the CPU in Triton's interpreter, on the GPU as is."""

import os
from importlib.util import find_spec

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported

from equilibrate import kernels  # noqa: E402
from equilibrate.kernels import conv_relu_pool, conv_relu_pool_reference, why_not_fused  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

# (R, B, C, H, W, O, F): every main/tail combination of C and O, filters 1 to 7, images that do not
# fill a block, an image narrower than its filter.
SHAPES = [
    (2, 3, 3, 8, 8, 16, 5),
    (1, 2, 16, 6, 4, 20, 5),
    (2, 1, 20, 4, 4, 20, 5),
    (2, 3, 1, 4, 6, 10, 3),
    (1, 2, 5, 2, 4, 3, 7),
    (3, 2, 2, 4, 2, 1, 1),
]


def operands(shape, draw):
    replicas, batch, c, h, w, o, f = shape
    return (
        draw(replicas, batch, c, h, w),
        draw(replicas, o, c, f, f),
        draw(replicas, o),
        draw(replicas, batch, o, h // 2, w // 2),
    )


def integers(*shape):
    return torch.randint(-2, 3, shape, device=DEVICE).float()


def normal(*shape):
    return torch.randn(shape, device=DEVICE)


def value_and_gradients(function, x, weight, bias, cotangent):
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, cotangent.to(y.dtype))


def twin(*tensors):
    return value_and_gradients(conv_relu_pool_reference, *(t.double() for t in tensors))


def fused(precision):
    return lambda *operands: kernels.fused(*operands, precision)


@needs_triton
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_small_integers_are_exact_with_their_ties_and_dead_relus(shape, precision):
    tensors = operands(shape, integers)
    ours = value_and_gradients(fused(precision), *tensors)
    for name, a, b in zip(("y", "x", "weight", "bias"), ours, twin(*tensors), strict=True):
        assert torch.equal(a.double(), b), name
