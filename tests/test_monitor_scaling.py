"""Gradient scaling with skipped steps, autocast, and parameters of half precision."""

import pytest
import torch
from support.naive import SkippingTwin, ThinnedTwin
from torch import nn

import equilibrate as eq

OPTIMIZERS = {
    "plain": lambda p, **k: torch.optim.SGD(p, lr=0.1, weight_decay=0.05, **k),
    "momentum": lambda p, **k: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.2, **k),
    "nesterov": lambda p, **k: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=1e-2, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=1e-2, **k),
}
SKIPPED = {
    "none": (),
    "beginning": (0, 1, 2),
    "measured": (7, 15, 27),
    "unmeasured": (8, 13, 14, 29),
    "last": (30, 31),
}


@pytest.fixture
def initialized_memory(monkeypatch):
    """Torch creates the buffers of a fused momentum step even if it then skips the step."""
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)


@pytest.mark.usefixtures("initialized_memory")
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("skipped", "clip"), [*((name, False) for name in SKIPPED), ("measured", True)]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps_are_not_counted_and_the_others_are_exact(name, skipped, fused, every, clip):
    model = nn.Linear(6, 3).double()
    optimizer = OPTIMIZERS[name](model.parameters(), fused=fused)
    monitor, twin = eq.Monitor(optimizer, every=every), SkippingTwin(optimizer, every)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    generator = torch.Generator().manual_seed(1)
    made = 0
    for t in range(32):
        is_skipped = t in SKIPPED[skipped]
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(16, 3, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if fused or not is_skipped:  # without a fused kernel a skipped step calls no hook
            twin.before()
        optimizer.zero_grad()
        scaler.scale((model(x) - y).square().mean() * (torch.inf if is_skipped else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if fused or not is_skipped:
            twin.after(skipped=is_skipped)
        made += not is_skipped
        if t not in (0, 3, 9, 15, 31):
            continue
        reading = monitor.reading()
        assert reading.step == made
        if made and twin.intervals:
            count, difference, right = twin.read()
            assert reading.count == count
            assert reading.right == pytest.approx(right, rel=1e-5)
            assert reading.difference == pytest.approx(difference, abs=1e-5 * abs(right))


def test_scaling_that_begins_in_mid_training():
    p = nn.Parameter(torch.randn(5).double())
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=True)
    monitor, twin = eq.Monitor(optimizer, every=1), ThinnedTwin(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t in range(20):
        optimizer.zero_grad()
        loss = (p - torch.randn(5)).square().sum()
        loss.backward(retain_graph=True)
        twin.before()
        if t >= 10:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        twin.after()
        count, difference, right = twin.read()
        assert monitor.reading().count == count
        assert monitor.reading().difference == pytest.approx(difference, abs=1e-6 * right)


def test_skipped_steps_stay_out_of_the_count_when_the_layout_changes():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1, fused=True)
    monitor = eq.Monitor(optimizer, every=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t in range(8):
        if t == 4:
            optimizer.add_param_group({"params": [q]})
        optimizer.zero_grad()
        scaler.scale((p.sum() + q.sum()) * (torch.inf if t in (1, 5) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.reading().step == 6
    assert monitor.reading().undefined is None
    state = monitor.state_dict()
    other = eq.Monitor(optimizer, every=1)
    other.load_state_dict(state)
    assert other.reading() == monitor.reading()


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_autocast_leaves_parameters_in_single_precision(name, every):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = OPTIMIZERS[name](model.parameters())
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(torch.randn(16, 6)) - torch.randn(16, 3)).square().mean()
        loss.backward()
        twin.before()
        optimizer.step()
        twin.after()
    count, difference, right = twin.read()
    assert monitor.reading().count == count
    assert monitor.reading().right == pytest.approx(right, rel=1e-4)
    assert monitor.reading().difference == pytest.approx(difference, abs=1e-4 * right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_half_precision_reads_the_rounded_step(name, every, dtype):
    params = [nn.Parameter(torch.randn(20, 5).to(dtype)) for _ in range(2)]
    optimizer = OPTIMIZERS[name](params)
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    for _ in range(40):
        for p in params:
            p.grad = (p.detach() - 1 + torch.randn(20, 5)).to(dtype)
        twin.before()
        optimizer.step()
        twin.after()
    count, difference, right = twin.read()
    assert monitor.reading().count == count
    assert monitor.reading().right == pytest.approx(right, rel=1e-5)
    assert monitor.reading().difference == pytest.approx(difference, abs=1e-5 * right)


def fused_step(optimizer, *, skip=False):
    """A step as GradScaler makes it."""
    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(skip))
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


@pytest.mark.parametrize("saved_after", range(1, 8))
def test_steps_skipped_before_a_save_are_not_counted_after_it(saved_after):
    """Steps 2, 3 and 6 are skipped; steps 1, 4 and 8 are measured."""
    theta = nn.Parameter(torch.ones(3).double())
    optimizer = torch.optim.SGD([theta], lr=0.1, fused=True)
    generator = torch.Generator().manual_seed(0)
    monitor = loaded = eq.Monitor(optimizer, every=4)
    for t in range(1, 9):
        theta.grad = torch.randn(3, generator=generator, dtype=torch.float64)
        fused_step(optimizer, skip=t in (2, 3, 6))
        if t == saved_after:
            state = monitor.state_dict()
            loaded = eq.Monitor(optimizer, every=4)
            loaded.load_state_dict(state)
    assert loaded.reading() == monitor.reading()
    assert loaded.reading().step == 5


@pytest.mark.parametrize("edited_after", range(4, 8))
def test_edits_between_fused_steps_are_noticed(edited_after):
    theta = nn.Parameter(torch.ones(3).double())
    optimizer = torch.optim.SGD([theta], lr=0.1, weight_decay=0.1, fused=True)
    monitor, twin = eq.Monitor(optimizer, every=4), ThinnedTwin(optimizer, 4)
    generator = torch.Generator().manual_seed(0)
    for t in range(1, 13):
        theta.grad = torch.randn(3, generator=generator, dtype=torch.float64)
        twin.before(edited=t == edited_after + 1)
        fused_step(optimizer)
        twin.after()
        if t == edited_after:
            with torch.no_grad():
                theta.mul_(3.0)
    count, difference, right = twin.read()
    reading = monitor.reading()
    assert reading.count == count
    assert reading.right == pytest.approx(right, rel=1e-9)
    assert reading.difference == pytest.approx(difference, rel=1e-6)
