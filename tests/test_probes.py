"""What is noted in a step and worked out later does not depend on when it is asked for."""

import pytest
import torch
from torch import nn

import equilibrate as eq
from equilibrate.probes import BlockProbe

FORMS = [
    {},
    {"weight_decay": 0.05},
    {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True},
]


def readings_of(form, asked, names=False, steps=3 * BlockProbe.block + 5):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **form)
    monitor = eq.Monitor(optimizer, names=model.named_parameters() if names else None)
    for t in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(8, 5)) - torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        if asked(t):
            monitor.reading()
    return monitor.readings()


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_asking_for_a_reading_changes_no_bit_of_a_later_one(form, names):
    never = readings_of(form, lambda t: False, names)
    assert readings_of(form, lambda t: True, names) == never
    assert readings_of(form, lambda t: t % 7 == 3, names) == never


def test_steps_without_any_gradient_count_zero():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    monitor = eq.Monitor(optimizer)
    for gradient in (torch.ones(2), None, torch.ones(2), None):
        p.grad = gradient
        optimizer.step()
    # The window is the last two steps: θ·g = 1 at the third (θ = ½), nothing at the fourth.
    assert monitor.reading() == eq.Reading(step=4, count=2, left=0.5, right=0.25, lr=0.5)


def test_a_double_precision_learning_rate_that_is_changed_in_place():
    p, lr = nn.Parameter(torch.ones(2)), torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.SGD([p], lr=lr)
    monitor = eq.Monitor(optimizer)
    p.grad = torch.ones(2)
    optimizer.step()
    lr.zero_()
    assert (monitor.reading().left, monitor.reading().right) == (2.0, 0.5)


def test_momentum_is_read_right_after_the_parameters_were_edited():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.5)
    monitor = eq.Monitor(optimizer)
    for _ in range(5):
        p.grad = torch.randn(2)
        optimizer.step()
    with torch.no_grad():
        p.mul_(3)
    theta, p.grad = p.detach().clone(), torch.randn(2)
    monitor.reset()
    optimizer.step()
    assert monitor.reading().left == pytest.approx(float(theta @ p.grad), rel=1e-5)
    optimizer.state[p]["momentum_buffer"].zero_()
    theta, p.grad = p.detach().clone(), torch.randn(2)
    monitor.reset()
    optimizer.step()
    assert monitor.reading().left == pytest.approx(float(theta @ p.grad), rel=1e-5)


@pytest.mark.parametrize("form", [{}, {"momentum": 0.9, "nesterov": True}])
def test_a_step_that_forgets_the_parameters_is_refused(form):
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1, weight_decay=10, **form)
    eq.Monitor(optimizer)
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match="lr × weight_decay is 1"):
        optimizer.step()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_no_step_waits_and_the_readings_are_those_of_a_cpu(form, fused):
    def readings(device, sync_debug_mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
        xs, ys = torch.randn(200, 8, 5), torch.randn(200, 8, 3)
        model, xs, ys = model.to(device), xs.to(device), ys.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused, **form)
        monitor = eq.Monitor(optimizer, names=model.named_parameters())
        try:
            for t, (x, y) in enumerate(zip(xs, ys, strict=True)):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                if t == 3:  # libraries have been loaded
                    torch.cuda.set_sync_debug_mode(sync_debug_mode)
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return monitor.readings()

    expected = readings("cpu", "default")
    for name, reading in readings("cuda", "error").items():
        right = expected[name].right
        assert reading.right == pytest.approx(right, rel=1e-3)
        assert reading.left == pytest.approx(expected[name].left, rel=1e-3, abs=1e-3 * right)
