"""Training is bit-identical with and without a monitor; the global random state is untouched."""

import pytest
import torch
from torch import nn

import equilibrate as eq
from equilibrate._engine.relation.watch import Watch

SKIPPED = {
    "LBFGS",  # needs a closure
    "SparseAdam",  # needs sparse gradients
    "Muon",  # takes matrices alone
    "Optimizer",
}
OPTIMIZERS = {
    **{
        name: (lambda p, kind=kind: kind(p, lr=1e-3))
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and name not in SKIPPED
    },
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-3),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, fused=True),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}
if not hasattr(torch.optim, "Muon"):  # torch 2.8
    del OPTIMIZERS["Muon"]


def trained(make, watch, every=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Dropout(), nn.Linear(20, 4))
    optimizer = make(model.parameters())
    monitor = None
    if watch:
        monitor = eq.Monitor(optimizer, every=every, named_parameters=model.named_parameters())
    for _ in range(50):
        optimizer.zero_grad()
        model(torch.randn(8, 10)).square().mean().backward()
        optimizer.step()
        if monitor:
            monitor.reading()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    state = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    state = [torch.as_tensor(v) for v in state if v is not None]
    return flat, gradients, state, torch.get_rng_state()


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_identical_with_a_monitor(name, every):
    bare, watched = trained(OPTIMIZERS[name], False), trained(OPTIMIZERS[name], True, every)
    for a, b in zip(bare[:2] + bare[3:], watched[:2] + watched[3:], strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(bare[2], watched[2], strict=True))


def held_by(monitor):
    """Numbers in all tensors of parameter size that a monitor holds."""
    tensors = [t for probe in monitor._watch.probes for t in tensors_in(vars(probe._sums))]
    return sum(t.numel() for t in tensors)


@pytest.mark.parametrize("every", [1, 16])
@pytest.mark.parametrize("form", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_sgd_is_watched_without_parameter_sized_memory(form, every):
    model = nn.Linear(300, 300, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, **form)
    monitor = eq.Monitor(optimizer, every=every)
    model(torch.randn(4, 300)).square().mean().backward()
    optimizer.step()
    assert held_by(monitor) == 0


@pytest.mark.parametrize(("every", "copies"), [(1, 1), (16, 0)])
def test_other_optimizers_need_a_copy_at_measured_steps_only(every, copies):
    model = nn.Linear(300, 300, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    monitor = eq.Monitor(optimizer, every=every)
    for _ in range(3):
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        assert held_by(monitor) == copies * 300 * 300


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


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_waits_for_the_device(monkeypatch, name, every):
    """No hook turns a tensor into a Python number, over several blocks of measurements."""
    guarded = False

    def guard(method):
        def wrapper(*args):
            nonlocal guarded
            guarded = True
            try:
                return method(*args)
            finally:
                guarded = False

        return wrapper

    def watch(original):
        def wrapper(*args, **kwargs):
            assert not guarded, "a hook waited for the device"
            return original(*args, **kwargs)

        return wrapper

    for method in ("before", "after"):
        monkeypatch.setattr(Watch, method, guard(getattr(Watch, method)))
    for method in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, method, watch(getattr(torch.Tensor, method)))
    model = nn.Linear(10, 4)
    optimizer = OPTIMIZERS[name](model.parameters())
    monitor = eq.Monitor(optimizer, every=every, named_parameters=model.named_parameters())
    model(torch.randn(8, 10)).square().mean().backward()
    for t in range(300):
        if t % 10 == 0:  # a learning rate that changes ends an interval
            optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
    assert monitor.reading().count > 0
