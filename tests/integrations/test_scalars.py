"""Named numbers for loggers."""

import math

import pytest
import torch
from support import networks
from torch import nn

import equilibrate as eq
from equilibrate.integrations.scalars import scalars


def noisy_steps(optimizer, steps):
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = 0.3 * (p.detach() - 1) + torch.randn_like(p)
        optimizer.step()


def parameters():
    return [nn.Parameter(torch.randn(6)) for _ in range(2)]


def test_a_monitor():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer)
    noisy_steps(optimizer, 50)
    reading = monitor.reading()
    assert scalars(monitor) == {
        "equilibrate/left": reading.left,
        "equilibrate/right": reading.right,
        "equilibrate/residual": reading.residual,
        "equilibrate/count": reading.count,
        "equilibrate/lr": 0.1,
    }


def test_numbers_that_are_undefined_are_left_out():
    params = parameters()
    monitor = eq.Monitor(torch.optim.SGD(params, lr=0.1))
    assert scalars(monitor) == {"equilibrate/count": 0, "equilibrate/lr": 0.1}
    params[0].grad = torch.full((6,), math.inf)
    monitor.optimizer.step()
    assert "equilibrate/residual" not in scalars(monitor)


def test_a_scheduler_right_after_a_lowering_and_later():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    scheduler = eq.FDRScheduler(optimizer, threshold=1e9, factor=0.5, min_steps=10, every=1)
    noisy_steps(optimizer, 20)
    scheduler.step()
    judged = scheduler.last_decision.reading
    found = scalars(scheduler)
    assert judged.count == 10
    assert found["equilibrate/residual"] == judged.residual
    assert (found["equilibrate/lowered"], found["equilibrate/lr"]) == (1, 0.05)
    noisy_steps(optimizer, 4)
    scheduler.step()
    found = scalars(scheduler)
    assert found["equilibrate/residual"] == scheduler.monitor.reading().residual
    assert (found["equilibrate/lowered"], found["equilibrate/count"]) == (0, 2)


def test_groups_with_different_learning_rates():
    one, two = parameters()
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [two], "lr": 0.2}], lr=0.1)
    found = scalars(eq.Monitor(optimizer))
    assert found["equilibrate/lr/group_0"] == 0.1
    assert found["equilibrate/lr/group_1"] == 0.2
    assert "equilibrate/lr" not in found


def test_an_optimizer_without_a_learning_rate():
    class Fixed(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    assert scalars(eq.Monitor(Fixed(parameters()))) == {"equilibrate/count": 0}


def test_layers():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer, named_parameters=model.named_parameters())
    noisy_steps(optimizer, 20)
    found = scalars(monitor, layers=True)
    for name, reading in monitor.parameter_readings().items():
        assert found[f"equilibrate_layers/{name}/residual"] == reading.residual
        assert found[f"equilibrate_layers/{name}/left"] == reading.left
        assert found[f"equilibrate_layers/{name}/right"] == reading.right
    assert len(found) == len(scalars(monitor)) + 6


def test_scale_invariant_layers_have_their_angular_step():
    model = networks.convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, weight_decay=0.01)
    monitor = eq.Monitor(optimizer, named_parameters=model.named_parameters(), every=4)
    networks.train(model, optimizer, 40)
    found, rotations = scalars(monitor, layers=True), monitor.parameter_rotations()
    angles = {name: v for name, v in found.items() if name.endswith("angular_step")}
    assert angles == {
        f"equilibrate_layers/{name}/{part}": getattr(rotations[name], field)
        for name in ("0.weight", "3.weight")
        for part, field in (
            ("angular_step", "angular_step"),
            ("equilibrium_angular_step", "equilibrium"),
        )
    }


def test_layers_need_names():
    with pytest.raises(ValueError, match=r"named_parameters=model.named_parameters"):
        scalars(eq.Monitor(torch.optim.SGD(parameters(), lr=0.1)), layers=True)


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match=r"source must be an eq.Monitor.*, got SGD"):
        scalars(torch.optim.SGD(parameters(), lr=0.1))  # pyright: ignore[reportArgumentType]
