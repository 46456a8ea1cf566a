"""A forecaster on a GPU: no step waits for it, and forecasts are a CPU's."""

import pytest
import torch
from test_forecast import Naive
from torch import nn

import equilibrate as eq

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "learning rate tensor": lambda p: torch.optim.SGD(
        p, lr=torch.tensor(0.02, device=p[0].device), fused=True
    ),
}


def forecasts(name, device, closure=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 8), nn.Tanh())
    model = model.to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    forecaster = eq.Forecaster(optimizer, (16, 40), every=4)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(150, 8, 3, 6, 6, generator=generator).to(device)

    def evaluate(x):
        optimizer.zero_grad()
        loss = (model(x) - x.mean((1, 2, 3))[:, None]).square().mean()
        loss.backward()
        return loss

    for t, x in enumerate(inputs):
        # The first steps compile kernels and create the state of the optimizer.
        mode = "error" if device == "cuda" and t > 10 else "default"
        torch.cuda.set_sync_debug_mode(mode)
        if closure:
            optimizer.step(lambda x=x: evaluate(x))
        else:
            evaluate(x)
            optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    return [f.gain.value for f in forecaster.forecasts()]


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_waits_and_forecasts_are_those_of_a_cpu(name, closure):
    found, expected = (forecasts(name, device, closure) for device in ("cuda", "cpu"))
    assert found == pytest.approx(expected, rel=0.02, abs=1e-6)


def test_a_model_that_went_back_to_the_host_can_be_read_and_averaged():
    """Lightning moves it there at the end of a training."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    monitor, forecaster = eq.Monitor(optimizer, every=4), eq.Forecaster(optimizer, (16,), every=4)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 6, device="cuda")).square().mean().backward()
        optimizer.step()
    with forecaster.averaged():
        expected = model.weight.detach().cpu()
    before = monitor.reading(), forecaster.forecasts()
    own = model.weight.detach().cpu()
    model.cpu()
    with forecaster.averaged():
        assert torch.equal(model.weight, expected)
    assert torch.equal(model.weight, own)
    assert (monitor.reading(), forecaster.forecasts()) == before


def test_a_graph_is_read_in_explicit_blocks():
    p = nn.Parameter(torch.ones(64, device="cuda"))
    optimizer = torch.optim.SGD([p], lr=0.1)
    forecaster = eq.Forecaster(optimizer, (16,), every=4)
    noise = torch.randn(64, device="cuda")
    p.grad = torch.zeros_like(p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        p.grad.copy_(p + noise)
        p.sub_(0.1 * p.grad)
    naive = Naive([16], every=4)
    for _ in range(80):
        noise.normal_()
        before = nn.Parameter(p.detach().clone())
        with eq.measure(optimizer):
            graph.replay()
        before.grad = p.grad.clone()
        naive.before(nn.ParameterList([before]))
    assert forecaster.forecasts()[0].gain.value == pytest.approx(naive.gain(0, 16), rel=1e-4)
