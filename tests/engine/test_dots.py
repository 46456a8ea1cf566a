"""Inner products against double-precision sums, for every layout and precision."""

import pytest
import torch
from equilibrate._engine.arithmetic.dots import gram, products


def naive(a, b):
    return float((a.to_dense().double() * b.to_dense().double()).sum())


def channels_last(t):
    return t.contiguous(memory_format=torch.channels_last)


def sparse(t):
    return (t * (t > 1)).to_sparse(1)


PAIRS = {
    "flat": lambda: (torch.randn(7), torch.randn(7)),
    "matrices": lambda: (torch.randn(5, 3), torch.randn(5, 3)),
    "number": lambda: (torch.randn(()), torch.randn(())),
    "transposed": lambda: (torch.randn(5, 3), torch.randn(3, 5).T),
    "channels last": lambda: tuple(channels_last(torch.randn(2, 3, 4, 5)) for _ in "ab"),
    "mixed layouts": lambda: (torch.randn(2, 3, 4, 5), channels_last(torch.randn(2, 3, 4, 5))),
    "expanded": lambda: (torch.randn(4, 3), torch.randn(1, 3).expand(4, 3)),
    "sparse": lambda: (torch.randn(6, 2), sparse(torch.randn(6, 2))),
    "double": lambda: (torch.randn(9).double(), torch.randn(9).double()),
    "half": lambda: (torch.randn(9).half(), torch.randn(9).half()),
    "bfloat16": lambda: (torch.randn(3, 3).bfloat16(), torch.randn(3, 3).bfloat16()),
    "two precisions": lambda: (torch.randn(9), torch.randn(9).bfloat16()),
    "long": lambda: (torch.randn(3, 200_000), torch.randn(3, 200_000)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_products_of_every_layout(name):
    theta, z = PAIRS[name]()
    along, square = products([theta], [z]).tolist()
    size = naive(theta.abs(), z.to_dense().abs())
    assert along == pytest.approx(naive(theta, z), abs=1e-6 * size)
    assert square == pytest.approx(naive(z, z), rel=1e-6)


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "sparse"])
def test_gram_holds_each_pair_once(name):
    a, b = PAIRS[name]()
    sums = gram([a, a], [b, b])
    assert sums.shape == (2, 3)
    aa, ab, bb = sums.unbind(1)
    size = naive(a.abs(), b.abs())
    assert aa[0].item() == pytest.approx(naive(a, a), rel=1e-6)
    assert ab[1].item() == pytest.approx(naive(a, b), abs=1e-6 * size)
    assert bb[1].item() == pytest.approx(naive(b, b), rel=1e-6)


def test_tensors_come_one_after_the_other():
    ones, twos = torch.ones(3), torch.full((2, 2), 2.0)
    assert products([ones, twos], [2 * ones, 3 * twos]).tolist() == [6, 12, 48, 144]


def test_long_sums_lose_no_digits():
    """A single dot product of two million terms is off by up to 3e-5."""
    x = torch.rand(2_000_000)
    along, square = products([x], [x]).tolist()
    assert along == square == pytest.approx(naive(x, x), rel=1e-6)
