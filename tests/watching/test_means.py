"""Both implementations of the means against float64, Triton's in its interpreter on a CPU."""

import pytest
import torch
from support.device import DEVICE

from equilibrate.watching.means import TorchMeans, choose

triton = pytest.importorskip("triton")

SHAPES = [(40, 50), (7,), (3, 3, 5), (0,), ()]
WEIGHTS = [1.0, 0.5, 1.0, 1.0, 2.0]
KINDS = ["torch", "triton"]


def implementation(kind, params, count, weights=None):
    from equilibrate.watching.kernels import TritonMeans

    weights = weights or [1.0] * len(params)
    return (TorchMeans if kind == "torch" else TritonMeans)(params, count, weights)


def shares(decays, count):
    """By how much of the difference means with weights b^j move at the count-th measurement."""
    return [(1 - b) / (1 - b**count) for b in decays]


def tensors(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in SHAPES]


class Naive:
    """The means and sums in float64."""

    def __init__(self, decays, weights):
        self.decays, self.weights, self.seen = decays, weights, []

    def measure(self, params, gradients):
        sums = []
        for b in self.decays:
            means = self.means(b, params)
            terms = [
                w * ((p.double() - m) * g.to_dense().double()).sum()
                for w, p, m, g in zip(self.weights, params, means, gradients, strict=True)
                if g is not None
            ]
            sums.append(torch.stack(terms).sum())
        self.seen.append([p.double().clone() for p in params])
        return torch.stack(sums)

    def means(self, b, like):
        """Σ b^j θ_j / Σ b^j over all parameters seen, the last of them with j = 0."""
        total = [torch.zeros_like(p, dtype=torch.float64) for p in like]
        norm = 0.0
        for j, seen in enumerate(reversed(self.seen)):
            norm += b**j
            total = [t + b**j * s for t, s in zip(total, seen, strict=True)]
        return [t / max(norm, 1e-300) for t in total]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "decays"),
    [
        (torch.float64, (0.9,)),
        (torch.float32, (0.9, 0.6)),
        (torch.bfloat16, (0.99, 0.8, 0.3)),
        (torch.float16, (0.9,)),
    ],
)
def test_means_and_sums(dtype, decays, kind):
    params = tensors(dtype)
    means, naive = implementation(kind, params, len(decays), WEIGHTS), Naive(decays, WEIGHTS)
    out = torch.full((len(decays),), torch.nan, dtype=torch.float64, device=DEVICE)
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 0, "atol": 2e-4}
    for count in range(1, 5):
        gradients = tensors(dtype, seed=count)
        gradients[1] = None
        means.measure(params, gradients, out, shares(decays, count))
        expected = naive.measure(params, gradients)
        if count > 1:  # the first time there is no mean to compare with
            torch.testing.assert_close(out, expected, **close)
        params = [
            0.9 * p + 0.1 * g for p, g in zip(params, tensors(dtype, 10 + count), strict=True)
        ]
    for b, found in zip(decays, means.tensors(), strict=True):
        for m, expected in zip(found, naive.means(b, params), strict=True):
            assert m.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
            torch.testing.assert_close(m.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_other_memory_layouts_and_sparse_gradients(kind):
    last = torch.channels_last
    p = torch.randn(4, 3, 5, 5, dtype=torch.float64, device=DEVICE).to(memory_format=last)
    q = torch.randn(6, 4, dtype=torch.float64, device=DEVICE)
    means, naive = implementation(kind, [p, q], 1), Naive([0.7], [1.0, 1.0])
    out = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    for count in range(1, 4):
        g = torch.randn(4, 3, 5, 5, dtype=torch.float64, device=DEVICE)
        h = torch.randn(6, 4, dtype=torch.float64, device=DEVICE)
        h[2:] = 0
        means.measure([p, q], [g, h.to_sparse()], out, shares([0.7], count))
        expected = naive.measure([p, q], [g, h])
        p, q = p + g, (q + 1).t().contiguous().t()  # another layout of the second parameter
    torch.testing.assert_close(out, expected)
    (found,) = means.tensors()
    for m, e in zip(found, naive.means(0.7, [p, q]), strict=True):
        torch.testing.assert_close(m, e)


def test_large_tensors_are_read_in_chunks(monkeypatch):
    from equilibrate.watching import kernels

    monkeypatch.setattr(kernels, "_PROGRAMS", 2)
    params = [torch.randn(5000, device=DEVICE), torch.randn(3, device=DEVICE)]
    means, naive = kernels.TritonMeans(params, 1, [1.0, 3.0]), Naive([0.5], [1.0, 3.0])
    out = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    for count in (1, 2, 3):
        gradients = [torch.randn_like(p) for p in params]
        means.measure(params, gradients, out, shares([0.5], count))
        expected = naive.measure(params, gradients)
        params = [p + 0.1 * g for p, g in zip(params, gradients, strict=True)]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
def test_triton_is_chosen_for_dense_parameters_on_a_gpu():
    params = [torch.ones(2, 3, device="cuda")]
    assert type(choose(params, 1, [1.0])).__name__ == "TritonMeans"
    strided = [torch.ones(4, 6, device="cuda")[:, ::2]]
    assert isinstance(choose(strided, 1, [1.0]), TorchMeans)
