"""Error bars of a monitor: of the model, of groups and parameters, in long runs and saved ones."""

import io
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


def tensors(count=4, dtype=torch.float64):
    return {f"p{i}": nn.Parameter(torch.ones(3, i + 1, dtype=dtype)) for i in range(count)}


@pytest.mark.parametrize("every", [1, 5])
def test_groups_dtypes_and_names_do_not_change_the_error_of_the_model(every):
    """The potentials of all parts are added up before anything is squared."""
    settings = {"lr": 0.1, "momentum": 0.8}
    found = []
    for split in (False, True):
        named = tensors() | {"single": nn.Parameter(torch.ones(5))}
        params = list(named.values())
        parts = [params[:2], params[2:]] if split else [params]
        optimizer = torch.optim.SGD([{"params": part} for part in parts], **settings)
        monitor = eq.Monitor(optimizer, every=every, named_parameters=named if split else None)
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
    named = tensors()
    optimizer = kind(named.values(), lr=0.05)
    together = eq.Monitor(optimizer, named_parameters=named, every=4)
    generator = torch.Generator().manual_seed(1)
    alone = {}
    for name, p in tensors().items():
        single = kind([p], lr=0.05)
        alone[name] = p, single, eq.Monitor(single, every=4)
    for _ in range(200):
        for name, p in named.items():
            other, single, _ = alone[name]
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad, other.grad = 0.3 * (p.detach() - 1) + noise, 0.3 * (other.detach() - 1) + noise
            single.step()
        optimizer.step()
    for name, reading in together.parameter_readings().items():
        expected = alone[name][2].reading()
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
    rows = [len(probe.ring.rows()) for probe in monitor._watch.probes]
    assert rows[0] != rows[1]
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
        assert reading.steps_for(0.01) == pytest.approx(
            model.residual_deviation(1000) * 1e5, rel=0.35
        )


def test_fewer_than_eight_measurements_have_no_error_bar():
    p = nn.Parameter(torch.ones(4).double())
    optimizer = torch.optim.SGD([p], lr=0.1)
    monitor = eq.Monitor(optimizer, every=16)
    assert math.isnan(monitor.reading().stderr)
    train(optimizer, 16 * 14)
    assert math.isnan(monitor.reading().stderr)
    train(optimizer, 16)
    assert monitor.reading().stderr > 0
    monitor.reset()
    assert math.isnan(monitor.reading().stderr)


def test_readings_that_are_undefined_have_no_error_bar():
    still = nn.Parameter(torch.ones(4).double())
    moving = nn.Parameter(torch.ones(4).double())
    optimizer = torch.optim.SGD([{"params": [still]}, {"params": [moving]}], lr=0.1)
    named = {"still": still, "moving": moving}
    monitor = eq.Monitor(optimizer, every=1, named_parameters=named)
    for t in range(40):
        still.grad, moving.grad = torch.zeros(4).double(), torch.full((4,), (-1.0) ** t).double()
        optimizer.step()
    readings = monitor.parameter_readings()
    assert "no fluctuations" in str(readings["still"].undefined)
    assert math.isnan(readings["still"].stderr)
    assert math.isnan(readings["still"].margin)
    assert readings["moving"].stderr > 0
    moving.grad = torch.full((4,), math.inf).double()
    optimizer.step()
    assert math.isnan(monitor.reading().stderr)
    assert math.isnan(monitor.parameter_readings()["moving"].margin)


def test_full_batches_have_no_error_bar():
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=0.1)
    monitor = eq.Monitor(optimizer, every=1)
    for _ in range(400):
        p.grad = p.detach() - 1e3
        optimizer.step()
    reading = monitor.reading()
    assert reading.undefined
    assert math.isnan(reading.stderr)


def test_a_saved_scheduler_has_the_error_of_its_last_reading():
    p = nn.Parameter(torch.ones(4).double())
    optimizer = torch.optim.SGD([p], lr=0.1)
    scheduler = eq.FDRScheduler(optimizer, every=4)
    train(optimizer, 400)
    scheduler.step()
    file = io.BytesIO()
    torch.save(scheduler.state_dict(), file)
    file.seek(0)
    other = eq.FDRScheduler(torch.optim.SGD([p], lr=0.1), every=4)
    other.load_state_dict(torch.load(file))
    saved, loaded = scheduler.last_decision.reading, other.last_decision.reading
    assert saved.stderr == loaded.stderr > 0
    assert saved.margin == loaded.margin
    assert other.monitor.reading().stderr == saved.stderr
    state = scheduler.state_dict()
    for name in ("stderr", "margin"):  # as saved by earlier versions
        del state["decision"]["reading"][name]
    other.load_state_dict(state)
    assert math.isnan(other.last_decision.reading.stderr)


def test_the_reason_for_waiting_mentions_noise_that_exceeds_the_threshold():
    p = nn.Parameter(torch.ones(1).double())
    optimizer = torch.optim.SGD([p], lr=0.1)
    scheduler = eq.FDRScheduler(optimizer, threshold=1e-6, every=1)
    train(optimizer, 800)
    scheduler.step()
    decision = scheduler.last_decision
    assert not decision.lowered
    assert f"but the standard error, {decision.reading.stderr:.2g}, is above" in decision.reason
    assert decision.reason.endswith(" more steps")
