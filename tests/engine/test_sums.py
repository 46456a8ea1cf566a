"""Both implementations of the sums against float64, the Triton one in its interpreter on a CPU."""

import pytest
import torch
from equilibrate._engine.arithmetic.sums import TorchSums, choose
from equilibrate._engine.optimizer.updates import Update
from support.device import DEVICE

triton = pytest.importorskip("triton")

SHAPES = [(40, 50), (7,), (3, 3, 5), (0,), ()]
UPDATES = {
    "gradient": Update("gradient", 0.1, gradient=-1.2, parameters=0.3),
    "buffer": Update("buffer", 0.1, 0.9, 0.0, buffer=1.0),
    "both": Update("both", 0.1, gradient=1.0, parameters=0.2, buffer=0.9),
    "difference": Update("difference", 0.1),
}


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in SHAPES]


def expected(update, before, params, gradients, buffers):
    rows = []
    for old, p, g, b in zip(before, params, gradients, buffers, strict=True):
        theta = p.double()
        if update.source == "difference":
            d = old.double() - theta
        elif (update.gradient and g is None) or (update.buffer and b is None):
            d = torch.zeros_like(theta)
        else:
            d = update.parameters * theta
            d = d + update.gradient * g.to_dense().double() if update.gradient else d
            d = d + update.buffer * b.to_dense().double() if update.buffer else d
        rows.append(torch.stack([(theta * theta).sum(), (theta * d).sum(), (d * d).sum()]))
    return torch.stack(rows)


def implementations(params):
    from equilibrate._engine.arithmetic.sums_triton import TritonSums

    return {"torch": TorchSums(), "triton": TritonSums(params)}


@pytest.mark.parametrize("kind", ["torch", "triton"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in UPDATES for dtype in (torch.float32, torch.float64)),
        # Half precision is read from differences alone.
        *(("difference", dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_sums(name, dtype, kind):
    update = UPDATES[name]
    params = tensors(dtype)
    before = [p.clone() for p in params]
    gradients = [torch.randn_like(p) for p in params]
    buffers = [torch.randn_like(p) for p in params]
    gradients[1] = None  # pyright: ignore[reportArgumentType, reportCallIssue]
    sums = implementations(params)[kind]
    if name == "difference":
        sums.save(params)
        for p in params:
            p.mul_(0.97)
    out = torch.full((len(params), 3), torch.nan, dtype=torch.float64, device=DEVICE)
    sums.measure(update, params, gradients, buffers, out, norm=True)
    truth = expected(update, before, params, gradients, buffers)
    torch.testing.assert_close(out, truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out[:, 0], truth[:, 0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_other_memory_layouts(kind):
    p = torch.randn(4, 3, 5, 5, device=DEVICE).to(memory_format=torch.channels_last)
    g = torch.randn(4, 3, 5, 5, device=DEVICE)
    out = torch.zeros(1, 3, dtype=torch.float64, device=DEVICE)
    update = UPDATES["gradient"]
    implementations([p])[kind].measure(update, [p], [g], [None], out, norm=True)
    truth = expected(update, [p], [p], [g], [None])
    torch.testing.assert_close(out, truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_parameters_that_moved_in_memory_are_followed(kind):
    params = tensors()
    sums = implementations(params)[kind]
    nothing = [None] * len(params)
    out = torch.zeros(len(params), 3, dtype=torch.float64, device=DEVICE)
    for _ in range(2):
        sums.measure(Update("difference", 0.1), params, nothing, nothing, out, norm=True)
        assert out[0, 0].item() == pytest.approx(params[0].double().square().sum().item())
        params = [2 * p for p in params]


@pytest.mark.parametrize(("small", "chunks"), [(0, 6), (1 << 18, 2)])
def test_tensors_are_read_whole_or_in_chunks(small, chunks, monkeypatch):
    from equilibrate._engine.arithmetic import sums_triton

    monkeypatch.setattr(sums_triton, "_SMALL", small)
    params = [torch.randn(5000, device=DEVICE), torch.randn(3, device=DEVICE)]
    buffers = [torch.randn_like(p) for p in params]
    out = torch.zeros(2, 3, dtype=torch.float64, device=DEVICE)
    sums = sums_triton.TritonSums(params)
    assert len(sums._parts) == chunks
    sums.measure(UPDATES["buffer"], params, [None] * 2, buffers, out, norm=True)
    truth = expected(UPDATES["buffer"], params, params, [None] * 2, buffers)
    torch.testing.assert_close(out, truth, rtol=1e-9, atol=1e-9)


def test_the_plain_implementation_is_chosen_on_a_cpu():
    assert isinstance(choose([torch.ones(2)]), TorchSums)


@pytest.mark.gpu
def test_triton_is_chosen_for_dense_parameters_on_a_gpu():
    params = [torch.ones(2, 3, device="cuda")]
    assert type(choose(params)).__name__ == "TritonSums"
    assert isinstance(choose([torch.ones(4, 6, device="cuda")[:, ::2]]), TorchSums)
