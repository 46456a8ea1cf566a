"""A forecaster on a GPU: no step waits for it, and forecasts are a CPU's."""

import numpy as np
import pytest
import torch
from test_forecast import Naive, products
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


@pytest.fixture(autouse=True)
def waiting_is_allowed_again():
    """Leave the mode behind in which waiting for the device is an error, after a failure too."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def forecasts(name, device, closure=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 8), nn.Tanh())
    model = model.to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    forecaster = eq.Forecaster(optimizer, model, every=4)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(150, 8, 3, 6, 6, generator=generator).to(device)

    def value(x):
        return (model(x) - x.mean((1, 2, 3))[:, None]).square().mean()

    def evaluate(x):
        optimizer.zero_grad()
        loss = value(x)
        loss.backward()
        return loss

    for t, x in enumerate(inputs):
        # The first steps compile kernels and create the state of the optimizer.
        mode = "error" if device == "cuda" and t > 10 else "default"
        torch.cuda.set_sync_debug_mode(mode)
        if closure:
            loss = optimizer.step(lambda x=x: evaluate(x))
        else:
            loss = evaluate(x)
            optimizer.step()
        forecaster.update(loss, lambda x=x: value(x))
    torch.cuda.set_sync_debug_mode("default")
    forecast = forecaster.forecast(60)
    return [forecast.now.value, forecast.gain.value, forecast.noise.value]


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
    monitor, forecaster = eq.Monitor(optimizer, every=4), eq.Forecaster(optimizer, every=4)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        forecaster.update(loss)
    with forecaster.averaged():
        expected = model.weight.detach().cpu()
    before = monitor.reading(), forecaster.forecast()
    own = model.weight.detach().cpu()
    model.cpu()
    with forecaster.averaged():
        assert torch.equal(model.weight, expected)
    assert torch.equal(model.weight, own)
    assert (monitor.reading(), forecaster.forecast()) == before


def test_a_graph_is_read_in_explicit_blocks():
    p = nn.Parameter(torch.ones(64, device="cuda"))
    optimizer = torch.optim.SGD([p], lr=0.1)
    forecaster = eq.Forecaster(optimizer, every=4)
    noise = torch.randn(64, device="cuda")
    p.grad = torch.zeros_like(p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        p.grad.copy_(p + noise)
        p.sub_(0.1 * p.grad)
    naive = Naive(every=4)
    for _ in range(80):
        noise.normal_()
        before = nn.Parameter(p.detach().clone())
        with eq.measure(optimizer):
            graph.replay()
        before.grad = p.grad.clone()
        naive.before(nn.ParameterList([before]))
    found, expected = np.array(products(forecaster)), np.array(naive.samples)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)
