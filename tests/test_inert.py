"""Training is bit-identical with and without a monitor; the global random state is untouched."""

import pytest
import torch
from torch import nn

import equilibrate as eq

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, fused=True),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def trained(make, watch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Dropout(), nn.Linear(20, 4))
    optimizer = make(model.parameters())
    monitor = eq.Monitor(optimizer, names=model.named_parameters()) if watch else None
    for _ in range(50):
        optimizer.zero_grad()
        model(torch.randn(8, 10)).square().mean().backward()
        optimizer.step()
        if monitor:
            monitor.reading()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    state = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return flat, gradients, state, torch.get_rng_state()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_identical_with_a_monitor(name):
    bare, watched = trained(OPTIMIZERS[name], False), trained(OPTIMIZERS[name], True)
    for a, b in zip(bare[:2] + bare[3:], watched[:2] + watched[3:], strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(bare[2], watched[2], strict=True))


@pytest.mark.parametrize("form", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_sgd_is_watched_without_parameter_sized_memory(form):
    """Each tensor that a monitor holds is smaller than the smallest that could be a copy."""
    model = nn.Linear(300, 300, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, **form)
    monitor = eq.Monitor(optimizer)
    model(torch.randn(4, 300)).square().mean().backward()
    optimizer.step()
    held = [t for lane in monitor._lanes for t in tensors_in(vars(lane)) if t is not model.weight]
    own = [t for t in held if t.data_ptr() != model.weight.data_ptr()]
    buffers = [optimizer.state[model.weight].get("momentum_buffer")]
    sizes = [t.numel() for t in own if not any(t is b for b in buffers)]
    assert sizes
    assert max(sizes) < 300 * 300


def test_any_other_optimizer_costs_at_most_one_copy():
    model = nn.Linear(300, 300, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    monitor = eq.Monitor(optimizer)
    for _ in range(3):
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
    held = {
        t.data_ptr(): t.numel()
        for lane in monitor._lanes
        for t in tensors_in(vars(lane._probe))
        if t.data_ptr() != model.weight.data_ptr()
    }
    assert sum(held.values()) <= 300 * 300


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors_in(v)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.optim.Optimizer):
        yield from tensors_in(vars(value))


def test_no_step_waits_for_the_device(monkeypatch):
    """Nothing in a step turns a tensor into a Python number (every way of doing so goes here)."""
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01, momentum=0.9)
    eq.Monitor(optimizer)
    model(torch.randn(8, 10)).square().mean().backward()

    def refuse(*_):
        raise AssertionError("a training step waited for the device")

    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for _ in range(20):
        optimizer.step()
