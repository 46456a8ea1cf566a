"""Named numbers for loggers."""

import math
from types import SimpleNamespace

import pytest
import torch
from support import networks
from support.recorded import noisy_steps
from torch import nn

import equilibrate as eq


def parameters():
    return [nn.Parameter(torch.randn(6)) for _ in range(2)]


def test_a_monitor():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer)
    assert eq.scalars(monitor) == {"equilibrate/count": 0, "equilibrate/lr": 0.1}  # undefined
    noisy_steps(optimizer, 50)
    reading = monitor.reading()
    assert eq.scalars(monitor) == {
        "equilibrate/left": reading.left,
        "equilibrate/right": reading.right,
        "equilibrate/residual": reading.residual,
        "equilibrate/count": reading.count,
        "equilibrate/lr": 0.1,
    }


def test_a_scheduler_right_after_a_lowering_and_later():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    scheduler = eq.FDRScheduler(optimizer, threshold=1e9, factor=0.5, min_steps=10, every=1)
    noisy_steps(optimizer, 20)
    scheduler.step()
    judged = scheduler.last_decision.reading
    found = eq.scalars(scheduler)
    assert judged.count == 10
    assert found["equilibrate/residual"] == judged.residual
    assert found["equilibrate/residual_high"] == judged.interval[1]
    assert found["equilibrate/lr"] == 0.05
    noisy_steps(optimizer, 4)
    found = eq.scalars(scheduler)
    assert found["equilibrate/residual"] == scheduler.monitor.reading().residual
    assert found["equilibrate/count"] == 2


def test_a_forecaster_alone_and_beside_a_monitor():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    forecaster, monitor = eq.Forecaster(optimizer, [64]), eq.Monitor(optimizer)
    noisy_steps(optimizer, 1000)
    (forecast,) = forecaster.forecasts()
    assert eq.scalars(forecaster) == {
        "equilibrate/lr": 0.1,
        "equilibrate/forecast/gain_64": forecast.gain.value,
        "equilibrate/forecast/gain_64_margin": forecast.gain.margin,
    }
    assert eq.scalars(monitor, forecaster) == eq.scalars(monitor) | eq.scalars(forecaster)


def test_learning_rates_that_differ_or_are_missing():
    class Fixed(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    one, two = parameters()
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [two], "lr": 0.2}], lr=0.1)
    found = eq.scalars(eq.Monitor(optimizer))
    assert (found["equilibrate/lr/group_0"], found["equilibrate/lr/group_1"]) == (0.1, 0.2)
    assert "equilibrate/lr" not in found
    assert eq.scalars(eq.Monitor(Fixed(parameters()))) == {"equilibrate/count": 0}


def test_layers_and_angular_steps_of_scale_invariant_ones():
    model = networks.convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, weight_decay=0.01)
    monitor = eq.Monitor(optimizer, named_parameters=model.named_parameters(), every=4)
    networks.train(model, optimizer, 40)
    found, rotations = eq.scalars(monitor, layers=True), monitor.parameter_rotations()
    for layer in eq.layers.read(monitor).layers:
        residual = found[f"equilibrate_layers/{layer.name}/residual"]
        assert residual == pytest.approx(layer.reading.residual, rel=1e-5)
    angles = {name: v for name, v in found.items() if name.endswith("angular_step")}
    assert angles == {
        f"equilibrate_layers/{name}/{part}": pytest.approx(
            getattr(rotations[name], field), rel=1e-5
        )
        for name in ("0.weight", "3.weight")
        for part, field in (
            ("angular_step", "angular_step"),
            ("equilibrium_angular_step", "equilibrium"),
        )
    }


def test_errors():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    for other in (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)):
        with pytest.raises(TypeError, match=rf"source must be an eq\.Mon.* {type(other).__name__}"):
            eq.scalars(other)
    with pytest.raises(TypeError, match="got NoneType"):
        eq.scalars()
    with pytest.raises(ValueError, match=r"named_parameters=model.named_parameters"):
        eq.scalars(eq.Monitor(optimizer), layers=True)
    with pytest.raises(ValueError, match=r"layers=True needs a monitor: pass an eq\.Monitor, too"):
        eq.scalars(eq.Forecaster(optimizer), layers=True)


def test_a_scheduler_that_knows_its_length_counts_its_own_steps():
    """It has a forecaster and no monitor; while it decays, the forecaster counts nothing."""
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    forecaster = SimpleNamespace(forecasts=lambda: (), step=3)
    scheduler = SimpleNamespace(
        optimizer=optimizer, forecaster=forecaster, last_decision=None, last_epoch=7, total_steps=9
    )
    from equilibrate.record.observe import Sources, observe

    assert observe(Sources.of(scheduler)) == {"step": 7, "lrs": [0.1], "forecasts": []}
    assert not math.isnan(eq.scalars(scheduler)["equilibrate/lr"])
