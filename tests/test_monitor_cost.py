"""What a monitor costs: not a bit of the training, no waiting, few calls, bounded memory."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from support.monitored import OTHERS
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import equilibrate as eq
from equilibrate.watching.watcher import Watcher

OPTIMIZERS = {
    **OTHERS,
    "SGD": lambda p: SGD(p, lr=0.1, weight_decay=0.01),
    "SGD, foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.2, fused=True),
}
SOURCE = str(Path(eq.__file__).parent)


def trained(make, every=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Dropout(), nn.Linear(20, 4))
    optimizer = make(list(model.parameters()))
    monitor = None if every is None else eq.Monitor(optimizer, model, every=every)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(8, 10)).square().mean().backward()
        optimizer.step()
        if monitor:
            monitor.reading()
    state = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    tensors = [torch.as_tensor(v) for v in state if v is not None]
    params = list(model.parameters())
    return [*(p.detach() for p in params), *(p.grad for p in params), *tensors], monitor


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_identical_with_a_monitor(name, every):
    bare, _ = trained(OPTIMIZERS[name])
    state = torch.get_rng_state()
    watched, monitor = trained(OPTIMIZERS[name], every)
    assert monitor.step == 30
    assert all(map(torch.equal, bare, watched))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_waits_for_the_device(monkeypatch, name, every):
    """No hook turns a tensor into a Python number, over several blocks of measurements."""
    guarded = False

    def guard(method):
        def wrapper(*args, **kwargs):
            nonlocal guarded
            guarded = True
            try:
                return method(*args, **kwargs)
            finally:
                guarded = False

        return wrapper

    def watch(original):
        def wrapper(*args, **kwargs):
            assert not guarded, "a hook waited for the device"
            return original(*args, **kwargs)

        return wrapper

    for method in ("before_step", "after_step"):
        monkeypatch.setattr(Watcher, method, guard(getattr(Watcher, method)))
    for method in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, method, watch(getattr(Tensor, method)))
    model = nn.Linear(10, 4)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    monitor = eq.Monitor(optimizer, model, every=every)
    model(torch.randn(8, 10)).square().mean().backward()
    group = optimizer.param_groups[0]
    for t in range(80 * every):
        if t % 10 == 0 and "lr" in group:
            group["lr"] *= 0.9
        optimizer.step()
    assert monitor.reading().count > 0


def calls_of(step):
    """Library functions that a call runs."""
    calls = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_library_calls_of_an_unmeasured_step(kind):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    optimizer = kind(model.parameters(), lr=1e-3)
    monitor = eq.Monitor(optimizer, model, every=16)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for _ in range(40):
        optimizer.step()
    counted = sorted((calls_of(optimizer.step) for _ in range(64)), key=len)
    assert len(counted[0]) <= 7, counted[0]
    assert counted[58] == counted[0]  # all but the measured ones, five at most
    assert monitor.step == 104


def copies(size):
    """Tensors of a size that are alive."""
    gc.collect()
    return sum(isinstance(each, Tensor) and each.numel() == size for each in gc.get_objects())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of objects that are only looked at
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("every", "kept"), [(1, 1), (16, 0)])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_copy_of_the_parameters_is_gone_after_a_measured_step(kind, every, kept):
    p = nn.Parameter(torch.randn(90_017))
    optimizer = kind([p], lr=0.1)
    p.grad = torch.randn_like(p)
    optimizer.step()
    bare = copies(90_017)
    monitor = eq.Monitor(optimizer, every=every)
    for _ in range(20):
        optimizer.step()
    assert copies(90_017) == bare + kept
    assert monitor.step == 20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("every", [1, 16])
def test_nothing_grows_with_the_number_of_steps(every):
    params = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(20)])
    optimizer = SGD(params.parameters(), lr=1e-3, momentum=0.9, fused=True)
    monitor = eq.Monitor(optimizer, params, every=every)
    for p in params:
        p.grad = torch.randn_like(p)

    def resident(steps):
        for _ in range(steps):
            optimizer.step()
        monitor.layers()
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident(5_000)
    assert resident(10_000) - before < 2e6


def test_the_state_does_not_grow_with_the_number_of_steps():
    """Its shapes are those of a new monitor, as torch.distributed.checkpoint needs it to be."""
    p = nn.Parameter(torch.ones(3))
    optimizer = SGD([p], lr=0.1, momentum=0.5)
    monitor = eq.Monitor(optimizer, every=1)

    def shapes(state):
        if isinstance(state, dict):
            return {key: shapes(value) for key, value in state.items()}
        if isinstance(state, list):
            return [shapes(value) for value in state]
        return state.shape if isinstance(state, Tensor) else type(state)

    new = shapes(monitor.state_dict())
    p.grad = torch.ones(3)
    for _ in range(3000):
        optimizer.step()
    old = shapes(monitor.state_dict())
    assert {**old, "lrs": None} == {**new, "lrs": None}
