"""Error bars of a monitor: of the model, of groups and parameters, in long runs and saved ones."""

import math

import pytest
import torch
from torch import nn

import equilibrate as eq
from equilibrate.solvable import Quadratic


def train(optimizer, steps, seed=1, decay=0.3):
    """Noisy gradients of a quadratic with its minimum at 1."""
    generator = torch.Generator().manual_seed(seed)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in params:
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = (decay * (p.detach() - 1) + noise).to(p.dtype)
        optimizer.step()


def tensors(count=4):
    return [nn.Parameter(torch.ones(3, i + 1, dtype=torch.float64)) for i in range(count)]


@pytest.mark.parametrize("every", [1, 5])
def test_groups_dtypes_and_names_do_not_change_the_error_of_the_model(every):
    """The potentials of all parts are added up before anything is squared."""
    settings = {"lr": 0.1, "momentum": 0.8}
    found = []
    for split in (False, True):
        params = [*tensors(), nn.Parameter(torch.ones(5))]
        parts = [params[:2], params[2:]] if split else [params]
        optimizer = torch.optim.SGD([{"params": part} for part in parts], **settings)
        monitor = eq.Monitor(optimizer, every=every)
        train(optimizer, 300)
        found.append(monitor)
    whole, parts = (monitor.reading() for monitor in found)
    assert whole.stderr == pytest.approx(parts.stderr, rel=1e-9)
    assert whole.margin == pytest.approx(parts.margin, rel=1e-9)
    assert 0 < parts.stderr < parts.margin
    errors = [reading.stderr for reading in found[1].group_readings().values()]
    assert all(error > 0 for error in errors)
    assert parts.stderr not in errors


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_each_parameter_has_the_error_that_it_would_have_alone(kind):
    model = nn.ParameterList(tensors())
    optimizer = kind(model.parameters(), lr=0.05)
    together = eq.Monitor(optimizer, model, every=4)
    generator = torch.Generator().manual_seed(1)
    alone = []
    for p in tensors():
        single = kind([p], lr=0.05)
        alone.append((p, single, eq.Monitor(single, every=4)))
    for _ in range(200):
        for p, (other, single, _) in zip(model, alone, strict=True):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad, other.grad = 0.3 * (p.detach() - 1) + noise, 0.3 * (other.detach() - 1) + noise
            single.step()
        optimizer.step()
    for layer, (_, _, monitor) in zip(together.layers().layers, alone, strict=True):
        reading, expected = layer.reading, monitor.reading()
        assert reading == expected
        assert reading.stderr == pytest.approx(expected.stderr, rel=1e-9)
        assert reading.margin == pytest.approx(expected.margin, rel=1e-9)
        assert reading.stderr > 0


def test_parts_whose_rows_end_at_other_steps_are_added_up():
    """In one group the rate changes, in the other parameters are edited, each at other steps.

    They move on smooth curves, so that it hardly matters at which steps they are compared.
    """
    first, second = nn.Parameter(torch.ones(4).double()), nn.Parameter(torch.ones(4).double())
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    monitor, plain = eq.Monitor(optimizer, every=7), eq.Monitor(optimizer, every=1)
    for t in range(600):
        if t % 41 == 0:
            optimizer.param_groups[0]["lr"] = 0.1 if t % 2 else 0.12
        if t in (345, 501):
            with torch.no_grad():
                second.mul_(1 + 1e-9)
        first.grad = torch.full((4,), math.sin(t / 30)).double()
        second.grad = torch.full((4,), 0.3 * math.sin(t / 19)).double()
        optimizer.step()
    found, exact = monitor.reading(), plain.reading()
    assert found.stderr == pytest.approx(exact.stderr, rel=0.1)
    assert found.margin == pytest.approx(exact.margin, rel=0.1)


def test_the_error_falls_as_one_over_n_also_where_rows_are_merged():
    """After 4,096 steps rows are merged. The error of a standard error is some 9 % here."""
    p = nn.Parameter(torch.ones(40).double())
    optimizer = torch.optim.SGD([p], lr=0.1)
    monitor = eq.Monitor(optimizer, every=1)
    model = Quadratic(torch.full((40,), 0.3), torch.ones(40), 0.1, minimum=torch.ones(40))
    for steps in (400, 800, 4800):
        train(optimizer, steps, seed=steps)
        reading = monitor.reading()
        exact = model.residual_deviation(reading.count)
        assert reading.stderr == pytest.approx(exact, rel=0.35)


def test_fewer_than_eight_measurements_have_no_error_bar():
    p = nn.Parameter(torch.ones(4).double())
    optimizer = torch.optim.SGD([p], lr=0.1)
    monitor = eq.Monitor(optimizer, every=16)
    assert math.isnan(monitor.reading().stderr)
    train(optimizer, 16 * 13)
    assert math.isnan(monitor.reading().stderr)
    train(optimizer, 16 * 5)
    assert monitor.reading().stderr > 0
    monitor.reset()
    assert math.isnan(monitor.reading().stderr)


def test_readings_that_are_undefined_have_no_error_bar():
    model = nn.ParameterDict({name: torch.ones(4).double() for name in ("still", "moving")})
    still, moving = model["still"], model["moving"]
    optimizer = torch.optim.SGD([{"params": [still]}, {"params": [moving]}], lr=0.1)
    monitor = eq.Monitor(optimizer, model, every=1)
    for t in range(40):
        still.grad, moving.grad = torch.zeros(4).double(), torch.full((4,), (-1.0) ** t).double()
        optimizer.step()
    readings = {layer.name: layer.reading for layer in monitor.layers().layers}
    assert "no fluctuations" in str(readings["still"].undefined)
    assert math.isnan(readings["still"].stderr)
    assert math.isnan(readings["still"].margin)
    assert readings["moving"].stderr > 0
    moving.grad = torch.full((4,), math.inf).double()
    optimizer.step()
    assert math.isnan(monitor.reading().stderr)
    assert math.isnan(monitor.group_readings()["group 1"].margin)
