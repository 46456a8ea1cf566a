"""N, θ·d and d² against float64: plain operations, and Triton's in its interpreter on a CPU."""

import pytest
import torch
from support.device import DEVICE

from equilibrate.watching.sums import TorchSums, choose, dot, norms

triton = pytest.importorskip("triton")

SHAPES = [(40, 50), (7,), (3, 3, 5), (0,), ()]
KINDS = ["torch", "triton"]


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in SHAPES]


def implementation(kind, params):
    from equilibrate.watching.kernels import TritonSums

    return TorchSums() if kind == "torch" else TritonSums(params)


def expected(params, vectors):
    rows = []
    for p, x in zip(params, vectors, strict=True):
        theta = p.double()
        d = torch.zeros_like(theta) if x is None else x.to_dense().double()
        rows.append(torch.stack([(theta * theta).sum(), (theta * d).sum(), (d * d).sum()]))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_of_a_step(dtype, kind):
    params = tensors(dtype)
    before = [p.clone() for p in params]
    sums = implementation(kind, params)
    out = torch.full((len(params), 3), torch.nan, dtype=torch.float64, device=DEVICE)
    for _ in range(2):  # with the same copies, and parameters that moved in memory
        sums.save(before)
        params = [0.97 * p for p in before]
        sums.measure(params, out, norm=True)
        differences = [b.double() - p.double() for b, p in zip(before, params, strict=True)]
        truth = expected(params, differences)
        torch.testing.assert_close(out, truth, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out[:, 0], truth[:, 0], rtol=1e-12, atol=0)
        before = params


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inner_products_with_buffers(dtype, kind):
    """One is missing, one is of another precision, one is sparse."""
    params = tensors(dtype)
    buffers = [torch.randn_like(p) for p in params]
    buffers[1] = None  # pyright: ignore[reportArgumentType, reportCallIssue]
    buffers[2] = buffers[2].float()
    buffers[0] = (buffers[0] * (buffers[0] > 1)).to_sparse(1)
    out = torch.full((len(params), 3), torch.nan, dtype=torch.float64, device=DEVICE)
    implementation(kind, params).inner(params, buffers, out)
    truth = expected(params, buffers)
    torch.testing.assert_close(out[:, :2], truth[:, :2], rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_other_memory_layouts(kind):
    p = torch.randn(4, 3, 5, 5, device=DEVICE).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 5, 5, device=DEVICE)
    out = torch.zeros(1, 3, dtype=torch.float64, device=DEVICE)
    implementation(kind, [p]).inner([p], [x], out)
    torch.testing.assert_close(out[:, :2], expected([p], [x])[:, :2], rtol=1e-6, atol=1e-5)


def test_large_tensors_are_read_in_chunks(monkeypatch):
    from equilibrate.watching import kernels

    monkeypatch.setattr(kernels, "_PROGRAMS", 2)
    params = [torch.randn(5000, device=DEVICE), torch.randn(3, device=DEVICE)]
    vectors = [torch.randn_like(p) for p in params]
    out = torch.zeros(2, 3, dtype=torch.float64, device=DEVICE)
    kernels.TritonSums(params).inner(params, vectors, out)
    torch.testing.assert_close(out, expected(params, vectors), rtol=1e-9, atol=1e-9)


def test_long_sums_lose_no_digits():
    """A single dot product of two million terms in single precision is off by up to 3e-5."""
    x = torch.rand(2_000_000)
    exact = x.double().square().sum()
    assert dot(x, x).item() == pytest.approx(exact.item(), rel=1e-6)
    assert norms([x]).item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.gpu
def test_triton_is_chosen_for_dense_parameters_on_a_gpu():
    params = [torch.ones(2, 3, device="cuda")]
    assert type(choose(params)).__name__ == "TritonSums"
    assert isinstance(choose([torch.ones(4, 6, device="cuda")[:, ::2]]), TorchSums)
