"""Named numbers for loggers."""

import pytest
import torch
from support import networks
from support.recorded import noisy_steps
from torch import nn

import equilibrate as eq
from equilibrate.record.observe import Sources, observe


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
    monitor = eq.Monitor(optimizer, every=1)
    scheduler = eq.FDRScheduler(optimizer, 1e9, 0.5, min_steps=10, monitor=monitor)
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
    forecaster, monitor = eq.Forecaster(optimizer), eq.Monitor(optimizer)
    assert eq.scalars(forecaster) == {"equilibrate/lr": 0.1}  # undefined
    noisy_steps(optimizer, 1000, forecaster=forecaster)
    forecast = forecaster.forecast()
    assert eq.scalars(forecaster) == {
        "equilibrate/lr": 0.1,
        "equilibrate/forecast/after": forecast.after.value,
        "equilibrate/forecast/after_margin": forecast.after.margin,
        "equilibrate/forecast/now": forecast.now.value,
        "equilibrate/forecast/staying": forecast.staying.value,
        "equilibrate/forecast/gain": forecast.gain.value,
        "equilibrate/forecast/gain_margin": forecast.gain.margin,
        "equilibrate/forecast/horizon": 200,
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
    monitor = eq.Monitor(optimizer, model, every=4)
    networks.train(model, optimizer, 40)
    found, table = eq.scalars(monitor, layers=True), monitor.layers()
    rotations = {layer.name: layer.rotation for layer in table.layers}
    for layer in table.layers:
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
    with pytest.raises(ValueError, match="there is no name for any parameter: pass the model"):
        eq.scalars(eq.Monitor(optimizer), layers=True)
    with pytest.raises(ValueError, match=r"layers=True needs a monitor: pass an eq\.Monitor, too"):
        eq.scalars(eq.Forecaster(optimizer), layers=True)


def test_a_cooldown_counts_its_own_steps_and_forecasts_until_it_decays():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    scheduler = eq.Cooldown(optimizer, total_steps=1000)
    for _ in range(1000):
        noisy_steps(optimizer, 1)
        scheduler.step(1.0)
        if scheduler.last_epoch == 400:
            row = observe(Sources.of(scheduler))
            assert (row["step"], row["lrs"]) == (400, [0.1])
            assert row["forecast"]["horizon"] == 80
            assert eq.scalars(scheduler)["equilibrate/forecast/after"] == row["forecast"]["after"]
    assert scheduler.forecaster.step < 1000  # nothing is measured once it decays
    row = observe(Sources.of(scheduler))
    assert (row["step"], row["lrs"]) == (1000, [0.0])
    assert "forecast" not in row
    assert eq.scalars(scheduler) == {"equilibrate/lr": 0.0}
