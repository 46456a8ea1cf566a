"""Compare the Triton convolution with plain torch: on a GPU, or in Triton's interpreter."""

from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.device import DEVICE, ON_GPU

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from equilibrate_paper.ensemble._ops.conv import conv_relu_pool, launch, pack_images
from equilibrate_paper.ensemble._ops.conv.geometry import Geometry, main_and_tail
from equilibrate_paper.ensemble.examples import IndexedInputs

# (R, B, C, H, W, O, F): every main/tail combination of C and O, filters 1 to 7, images that do not
# fill a block, an image narrower than its filter.
SHAPES = [
    (2, 3, 3, 8, 8, 16, 5),
    (1, 2, 16, 6, 4, 20, 5),
    (1, 1, 20, 4, 4, 20, 5),
    (2, 3, 1, 4, 6, 10, 3),
    (1, 2, 5, 2, 4, 3, 7),
    (3, 2, 2, 4, 2, 1, 1),
]
SMALL = SHAPES[3]


def operands(shape, draw):
    replicas, batch, c, h, w, o, f = shape
    return (
        draw(replicas, batch, c, h, w),
        draw(replicas, o, c, f, f),
        draw(replicas, o),
        draw(replicas, batch, o, h // 2, w // 2),
    )


def integers(*shape):
    """Small integers: products and sums are exact in every precision, and there are many ties."""
    return torch.randint(-2, 3, shape, device=DEVICE).float()


def normal(*shape):
    return torch.randn(shape, device=DEVICE)


def value_and_gradients(function, x, weight, bias, cotangent):
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, cotangent.to(y.dtype))


def one_by_one(x, weight, bias):
    replicas = zip(x, weight, bias, strict=True)
    return torch.stack([F.max_pool2d(F.relu(F.conv2d(*r, padding="same")), 2) for r in replicas])


def twin(*tensors):
    return value_and_gradients(one_by_one, *(t.double() for t in tensors))


def layer(precision="ieee"):
    return partial(conv_relu_pool, precision=precision)


def assert_equal(ours, theirs):
    for name, a, b in zip(("y", "x", "weight", "bias"), ours, theirs, strict=True):
        assert torch.equal(a.double(), b.double()), name


def relative_error(a, b):
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "precision"),
    [(shape, "ieee") for shape in SHAPES]
    + [(SHAPES[0], "tf32"), (SMALL, "tf32x3"), (SHAPES[0], "fp16"), (SHAPES[1], "fp16")],
    ids=str,
)
def test_small_integers_are_exact(shape, precision):
    """With ties between maxima and zero ReLUs, whose gradients must match too."""
    tensors = operands(shape, integers)
    assert_equal(value_and_gradients(layer(precision), *tensors), twin(*tensors))


def test_ieee_precision_has_float32_accuracy():
    tensors = operands(SMALL, normal)
    for a, b in zip(value_and_gradients(layer("ieee"), *tensors), twin(*tensors), strict=True):
        assert relative_error(a, b) < 1e-6


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_rounding_to_eleven_bits_is_unbiased(precision):
    tensors = operands((4, 4, 1, 8, 8, 4, 3), normal)
    ours, theirs = layer(precision)(*tensors[:3]).double(), twin(*tensors)[0]
    assert 1e-5 < relative_error(ours, theirs) < 5e-4
    # Truncation would shrink sums by about 2·2⁻¹²·1.4 = 7e-4 on average.
    positive = theirs > 0.1
    assert abs(float((ours / theirs)[positive].mean() - 1)) < 1e-4


def test_half_precision_represents_small_gradients_of_a_mean():
    x, weight, bias, cotangent = operands(SMALL, normal)
    # No ReLU is zero, and candidates of a maximum differ by more than rounding errors.
    bias = bias + 100
    x[..., ::2, ::2] += 10
    weight = weight.abs()
    # Full accuracy ends at 5e-7/3 for a batch of 3; without scaling it would end at 6e-5.
    cotangent = cotangent.sign() * (1 + cotangent.abs()) * 5e-7 / 3
    tensors = (x, weight, bias, cotangent)
    for a, b in zip(value_and_gradients(layer("fp16"), *tensors), twin(*tensors), strict=True):
        assert relative_error(a, b) < 5e-4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from numpy, in the interpreter
def test_overflow_in_half_precision_is_infinite_in_that_replica_only():
    x, weight, bias, cotangent = operands(SMALL, normal)
    large = x.clone()
    large[0] += 7e4
    y = layer("fp16")(large, weight.abs(), bias)
    assert not y[0].isfinite().any()
    assert y[1].isfinite().all()
    cotangent[0] = 1e3
    grad_weight = value_and_gradients(layer("fp16"), x, weight, bias + 100, cotangent)[2]
    assert not grad_weight[0].isfinite().any()
    assert grad_weight[1].isfinite().all()


def test_the_gradient_scale_is_a_power_of_two_proportional_to_the_batch():
    def scale(batch):
        return Geometry(1, batch, 1, 4, 4, 1, 1).scale

    assert [scale(batch) for batch in (1, 2, 100, 128)] == [2.0**8, 2.0**9, 2.0**14, 2.0**15]


def test_the_first_of_equal_maxima_gets_the_gradient():
    x = torch.ones(1, 1, 1, 4, 4, device=DEVICE, requires_grad=True)
    weight = torch.ones(1, 1, 1, 1, 1, device=DEVICE)
    y = layer()(x, weight, torch.zeros(1, 1, device=DEVICE))
    (grad,) = torch.autograd.grad(y.sum(), x)
    first = torch.tensor([[1.0, 0.0], [0.0, 0.0]], device=DEVICE).repeat(2, 2)
    assert torch.equal(grad[0, 0, 0], first)


@pytest.mark.parametrize("bias", [-100.0, 0.0])
def test_the_gradient_of_a_zero_relu_is_zero(bias):
    x, weight, _, cotangent = operands(SMALL, normal)
    weight = weight if bias else torch.zeros_like(weight)  # torch's gradient at 0 is 0 too
    bias = torch.full((2, 10), bias, device=DEVICE)
    for part in value_and_gradients(layer(), x, weight, bias, cotangent):
        assert torch.equal(part, torch.zeros_like(part))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # from numpy, in the interpreter
def test_a_nan_stays_a_nan_in_its_replica():
    if not ON_GPU and version("triton") >= "3.7":
        pytest.skip("newer interpreters raise on a maximum of NaNs")
    x, weight, bias, cotangent = operands(SMALL, normal)
    x[0, 0] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)  # CUDA's own NaN
    y, _, grad_weight, _ = value_and_gradients(layer("tf32"), x, weight, bias, cotangent)
    assert y[0, 0].isnan().all()
    assert y[1].isfinite().all()
    assert grad_weight[0].isnan().all()
    assert grad_weight[1].isfinite().all()


@pytest.mark.parametrize(("shape", "precision"), [(SMALL, "ieee"), (SHAPES[0], "fp16")], ids=str)
def test_a_packed_data_set_gives_the_same_results_as_its_images(shape, precision):
    x, weight, bias, cotangent = operands(shape, integers)
    images = integers(7, *x.shape[2:])
    packed = pack_images(images, width=shape[-1], precision=precision)
    own = torch.tensor([[3, 0, 3], [6, 1, 2]], device=DEVICE)
    shared = torch.arange(2, 5, device=DEVICE).expand(2, 3)
    for index in (own, shared):
        y, _, *theirs = twin(images[index], weight, bias, cotangent)
        leaves = [t.detach().requires_grad_() for t in (weight, bias)]
        indexed = IndexedInputs(packed, index)
        ours = conv_relu_pool(indexed, *leaves, precision)
        assert torch.equal(ours.double(), y)
        for a, b in zip(torch.autograd.grad(ours, leaves, cotangent), theirs, strict=True):
            assert torch.equal(a.double(), b)


def test_packing_in_several_launches_gives_the_same_result(monkeypatch):
    images = normal(5, 3, 4, 6)
    whole = launch.pack_data_set(images, 3, "fp16")
    monkeypatch.setattr(launch, "PACKED_AT_ONCE", 2)
    assert torch.equal(launch.pack_data_set(images, 3, "fp16"), whole)
    inner = whole[:, 1:-1, 1:-1, :3].permute(0, 3, 1, 2)
    assert torch.equal(inner, images.half())
    assert whole.double().square().sum() == inner.double().square().sum()  # zeros elsewhere


def test_several_blocks_per_program_give_the_same_result(monkeypatch):
    monkeypatch.setattr(launch, "CHIP", 0)  # any number of programs fills the chip
    monkeypatch.setattr(launch, "PIXELS", 4)
    tensors = operands(SHAPES[1], integers)
    assert_equal(value_and_gradients(layer("fp16"), *tensors), twin(*tensors))


def test_strides_do_not_matter():
    x, weight, bias, cotangent = operands(SMALL, integers)
    theirs = twin(x[:1].expand_as(x), weight, bias, cotangent)
    theta = torch.cat((weight.flatten(1), bias), dim=1)
    weight = theta[:, : -bias.shape[1]].view_as(weight)  # a slice of θ, as in an ensemble
    bias = theta[:, -bias.shape[1] :]
    shared = x[0].contiguous(memory_format=torch.channels_last).expand_as(x)
    cotangent = cotangent.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_equal(value_and_gradients(layer(), shared, weight, bias, cotangent), theirs)
    swapped = weight.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_equal(value_and_gradients(layer(), shared, swapped, bias, cotangent), theirs)


@given(st.integers(1, 64))
def test_main_and_tail_cover_with_powers_of_two(count):
    main, tail = main_and_tail(count)
    assert count <= main + tail < max(2 * count, 5)
    assert all(n & (n - 1) == 0 and (n == 0 or n >= 4) for n in (main, tail))


def test_layers_above_the_limits_raise():
    x, weight, bias, _ = operands((1, 2, 1, 4, 4, 33, 3), normal)
    with pytest.raises(ValueError, match="outputs 33 is above 32: use PlainOps"):
        layer()(x, weight, bias)


PAPER_LAYERS = [(100, 3, 32, 32, 16, 5), (100, 16, 16, 16, 20, 5), (100, 20, 8, 8, 20, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "replicas"),
    [("fp16", 4), ("fp16", 16), ("tf32", 4), ("tf32", 16), ("tf32x3", 4), ("ieee", 4)],
)
@pytest.mark.parametrize("shape", PAPER_LAYERS, ids=str)
def test_the_papers_layers_are_exact(shape, precision, replicas):
    tensors = operands((replicas, *shape), integers)
    ours = value_and_gradients(layer(precision), *tensors)
    assert_equal(ours, twin(*tensors))
    assert_equal(value_and_gradients(layer(precision), *tensors), ours)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_a_large_packed_data_set_is_exact(precision):
    shape = (4, *PAPER_LAYERS[0])
    x, weight, bias, cotangent = operands(shape, integers)
    images = integers(5000, *x.shape[2:])  # packed in more than one launch
    packed = pack_images(images, 5, precision)
    index = torch.randint(5000, x.shape[:2], device=DEVICE)
    y, _, *theirs = twin(images[index], weight, bias, cotangent)
    leaves = [t.detach().requires_grad_() for t in (weight, bias)]
    ours = conv_relu_pool(IndexedInputs(packed, index), *leaves, precision)
    assert torch.equal(ours.double(), y)
    for a, b in zip(torch.autograd.grad(ours, leaves, cotangent), theirs, strict=True):
        assert torch.equal(a.double(), b)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_results_are_reproducible_eagerly_and_in_a_cuda_graph(precision):
    *tensors, cotangent = operands((4, *PAPER_LAYERS[1]), normal)
    tensors = (
        *tensors,
        cotangent / cotangent.shape[1],
    )  # as of a mean, within the range of half precision
    first = value_and_gradients(layer(precision), *tensors)
    assert_equal(value_and_gradients(layer(precision), *tensors), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = value_and_gradients(layer(precision), *tensors)
    for _ in range(3):
        for part in captured:
            part.fill_(float("nan"))
        graph.replay()
        assert_equal(captured, first)
