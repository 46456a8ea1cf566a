"""The networks are those of appendix B, with Xavier initialization from a seed."""

import math

import pytest
import torch
from torch import nn

from equilibrate_paper.protocol.models import ARCHITECTURES, build

NAMES = list(ARCHITECTURES)


def shapes(model):
    return [tuple(p.shape) for p in model.parameters()]


def images(name, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *ARCHITECTURES[name].input_shape, generator=generator)


def weights_and_fans(model):
    """Each weight with fan_in + fan_out, counted by hand."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            yield layer.weight, layer.in_features + layer.out_features
        elif isinstance(layer, nn.Conv2d):
            area = layer.kernel_size[0] * layer.kernel_size[1]
            yield layer.weight, area * (layer.in_channels + layer.out_channels)


def test_mlp_is_784_200_200_10():
    assert shapes(build("mlp", 0)) == [(200, 784), (200,), (200, 200), (200,), (10, 200), (10,)]


def test_cnn_is_three_convolutions_and_one_linear_layer():
    """Appendix B: [5,16,1,2;2], [5,20,1,2;2], [5,20,1,2;2]; 32 → 16 → 8 → 4 pixels a side."""
    model = build("cnn", 0)
    assert shapes(model) == [
        *[(16, 3, 5, 5), (16,)],
        *[(20, 16, 5, 5), (20,)],
        *[(20, 20, 5, 5), (20,)],
        *[(10, 20 * 4 * 4), (10,)],
    ]
    convolutions = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    assert [(c.stride, c.padding) for c in convolutions] == 3 * [((1, 1), (2, 2))]
    pools = [layer for layer in model if isinstance(layer, nn.MaxPool2d)]
    assert [(p.kernel_size, p.stride) for p in pools] == 3 * [(2, 2)]


def affine(inputs, weight, bias):
    return [
        sum(w * x for w, x in zip(row, inputs, strict=True)) + b
        for row, b in zip(weight.tolist(), bias.tolist(), strict=True)
    ]


def convolve_by_hand(image, weight, bias):
    """Compute each output pixel in turn, with zeros outside the image."""
    (channels, height, width), reach = image.shape, weight.shape[-1] // 2
    output = torch.empty(len(weight), height, width, dtype=torch.float64)
    padded = torch.zeros(channels, height + 2 * reach, width + 2 * reach, dtype=torch.float64)
    padded[:, reach:-reach, reach:-reach] = image
    for row in range(height):
        for column in range(width):
            window = padded[:, row : row + 2 * reach + 1, column : column + 2 * reach + 1]
            output[:, row, column] = (weight * window).sum((1, 2, 3)) + bias
    return output


def halve_by_hand(image):
    """Return the maximum of every two by two pixels."""
    corners = [image[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
    return torch.stack(corners).amax(0)


@pytest.mark.parametrize("name", ["cnn", "digits-cnn"])
def test_cnn_equals_a_computation_by_hand(name):
    model = build(name, seed=1).double()
    for bias in list(model.parameters())[1::2]:  # zero biases would hide an error
        nn.init.uniform_(bias, -1, 1, generator=torch.Generator().manual_seed(2))
    batch = images(name, 2).double()
    *convolutions, weight, bias = (p.detach() for p in model.parameters())
    for image, logits in zip(batch, model(batch), strict=True):
        for w, b in zip(convolutions[::2], convolutions[1::2], strict=True):
            image = halve_by_hand(convolve_by_hand(image, w, b).clamp(min=0))
        expected = affine(image.flatten().tolist(), weight, bias)
        torch.testing.assert_close(logits.tolist(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_xavier_uniform_and_biases_zero(name):
    """Bounds are exact; mean and variance are within 5 standard errors of those of U(−a, a).

    With a random seed, each number would fail with probability below 6e-7, and the lower limit of
    the maximum with probability 0.9^200 < 1e-9 in the smallest layer.
    """
    model = build(name, seed=3)
    for weight, fans in weights_and_fans(model):
        bound, count = math.sqrt(6 / fans), weight.numel()
        values = weight.detach().double()
        assert 0.9 * bound < values.abs().max() <= bound
        assert values.mean().abs() < 5 * bound / math.sqrt(3 * count)
        error = bound**2 * math.sqrt((1 / 5 - 1 / 9) / count)
        assert (values.square().mean() - bound**2 / 3).abs() < 5 * error
    for parameter in list(model.parameters())[1::2]:
        assert parameter.dim() == 1
        assert not parameter.any()


@pytest.mark.parametrize("name", NAMES)
def test_seed_determines_the_weights(name):
    torch.manual_seed(1)
    first = build(name, seed=5)
    torch.manual_seed(2)
    second, other = build(name, seed=5), build(name, seed=6)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
    for (p, _), (q, _) in zip(weights_and_fans(first), weights_and_fans(other), strict=True):
        assert not torch.isclose(p, q, atol=1e-6).all()


@pytest.mark.parametrize("name", NAMES)
def test_global_random_state_is_unchanged(name):
    before = torch.get_rng_state()
    build(name, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_unknown_name_raises():
    with pytest.raises(ValueError, match="name='resnet' is not a model; choose one of mlp, cnn, "):
        build("resnet", 0)
