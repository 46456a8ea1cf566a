"""Statistics of traces against exact processes, and the rule that uses them."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import equilibrate as eq
from equilibrate.rules import Stationary, Verdict
from equilibrate.solvable import Quadratic
from equilibrate.stationarity import (
    Trace,
    assess,
    displacement,
    lagging_mean,
    residual,
    residual_error,
    squared_path,
)


def ornstein_uhlenbeck(repetitions, dimensions, relaxations, *, offset=0.0, points=100, seed=0):
    """Return exact positions and V of a process with unit variance and some relaxation times."""
    rng = np.random.default_rng(seed)
    rate = relaxations / points
    keep = math.exp(-rate)
    x = np.empty((repetitions, points + 1, dimensions))
    x[:, 0] = offset + (rng.standard_normal((repetitions, dimensions)) if not offset else 0)
    for i in range(points):
        noise = rng.standard_normal((repetitions, dimensions))
        x[:, i + 1] = keep * x[:, i] + math.sqrt(1 - keep**2) * noise
    return x, np.broadcast_to(2 * rate * dimensions * np.arange(points + 1), x.shape[:2])


def walk(repetitions, dimensions, *, drift=0.0, points=100, seed=0):
    rng = np.random.default_rng(seed)
    steps = drift + rng.standard_normal((repetitions, points, dimensions))
    x = np.concatenate([np.zeros((repetitions, 1, dimensions)), steps.cumsum(1)], 1)
    return x, np.broadcast_to(float(dimensions) * np.arange(points + 1), x.shape[:2])


def test_centres():
    x = np.array([[0.0], [1.0], [3.0], [2.0], [4.0]])
    v = np.arange(5.0) * 2
    assert residual(x, v, np.array([1.0])) == (9 - 1) / 8
    assert displacement(x, v) == -16 / 8
    assert lagging_mean(x) == 3.0
    squares = np.array([1.0, 0, 4, 1, 9])
    assert residual_error(x, v, np.ones(1)) == pytest.approx(math.sqrt(2) * squares.std() / 8)


def test_displacement_is_one_for_diffusion_and_the_relaxation_time_at_equilibrium():
    """Means of 4,000 chi-squared numbers of 10 degrees: 0.05 is more than 7 standard errors."""
    assert displacement(*walk(4000, 10)).mean() == pytest.approx(-1, abs=0.05)
    assert displacement(*walk(100, 10, drift=1.0)).mean() < -20
    x, v = ornstein_uhlenbeck(4000, 10, 20.0)
    assert displacement(x, v).mean() == pytest.approx(-1 / 20, rel=0.05)


def test_the_squared_path():
    x = np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])
    assert squared_path(x).tolist() == [0, 25, 26]
    assert squared_path(np.stack([x, 2 * x])).tolist() == [[0, 25, 26], [0, 100, 104]]


def test_relaxations_of_known_processes():
    """Medians of 400 traces of 20 directions, whose scatter is below 20 %.

    The mean position is estimated too, which adds about three relaxation times to a short trace. A
    part of the noise is pulled back within an interval, which takes some away from a long one.
    """
    for true in (10.0, 20.0, 40.0):
        found = assess(ornstein_uhlenbeck(400, 20, true)[0])
        assert true * 0.8 < np.median(found.relaxations) < true + 3.5
    far = assess(ornstein_uhlenbeck(400, 20, 10.0, offset=30.0)[0])
    assert np.median(far.relaxations) == pytest.approx(10, rel=0.1)
    assert np.median(far.start) > 0.3
    # The window is chosen for a small spread, which lowers the share of a walk by about 0.15.
    assert 0.7 < np.median(assess(walk(400, 50)[0]).diffusing) < 1


@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-5, 5), seed=st.integers(0, 20))
def test_units_and_origin_do_not_matter(scale, shift, seed):
    x, _ = ornstein_uhlenbeck(2, 3, 8.0, points=40, seed=seed)
    one, other = assess(x), assess(scale * (x + shift))
    for name in ("relaxations", "significance", "diffusing", "error", "start"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=1e-9)


def test_a_batch_equals_its_members():
    x, _ = ornstein_uhlenbeck(6, 3, 8.0, offset=5.0)
    together = assess(x)
    for i in range(6):
        alone = assess(x[i])
        assert alone.relaxations == pytest.approx(together.relaxations[i])
        assert alone.diffusing == pytest.approx(together.diffusing[i])


def test_error_rates():
    """1,000 traces each, fixed seeds. With a true rate of 0.5 % more than 16 act in 1e-5 of cases.

    A trace of 1.5 relaxation times has a mean loss 5 % above the floor after a halving.
    """
    rule = Stationary()
    assert rule.satisfied(walk(1000, 20)[0]).sum() <= 16
    assert rule.satisfied(walk(1000, 20, drift=0.3)[0]).sum() == 0
    assert rule.satisfied(ornstein_uhlenbeck(1000, 20, 1.5)[0]).sum() <= 16
    assert rule.satisfied(ornstein_uhlenbeck(1000, 20, 20.0)[0]).mean() > 0.9


def reading(x, v):
    trace = Trace(np.arange(len(x)), x, v)
    return replace(eq.Reading(step=99, count=50, left=1.0, right=1.0, lr=0.1), trace=trace)


def test_verdicts_say_why():
    rule = Stationary()
    x, v = ornstein_uhlenbeck(1, 20, 30.0)
    verdict = rule.judge(reading(x[0], v[0]))
    assert verdict.act
    assert verdict.reason.startswith("stationary for ")
    x, v = walk(1, 20, drift=1.0)
    assert rule.judge(reading(x[0], v[0])).reason.startswith("not yet: drifting ")
    x, v = walk(1, 20)
    assert rule.judge(reading(x[0], v[0])).reason.startswith("diffusing: ")
    x, v = ornstein_uhlenbeck(1, 1, 12.0)
    weak = Stationary(significance=99, diffusing=5.0, relaxations=1.0)
    assert "of 99 standard errors" in weak.judge(reading(x[0], v[0])).reason
    assert (
        "of 999 relaxation times"
        in replace(weak, relaxations=999.0).judge(reading(x[0], v[0])).reason
    )
    assert rule.judge(reading(x[0, :5], v[0, :5])).reason == "not yet: 5 of 11 positions"
    assert "trace=True" in rule.judge(replace(reading(x[0], v[0]), trace=None)).reason
    assert "do not move" in rule.judge(reading(0 * x[0], 0 * v[0])).reason
    still = replace(reading(x[0], v[0]), left=0.0, right=0.0)
    assert "both sides are zero" in rule.judge(still).reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"relaxations": 0.0}, "relaxations must be a positive number, got 0.0"),
        ({"significance": math.nan}, "significance must be a positive number, got nan"),
        ({"diffusing": -1.0}, "diffusing must be a positive number, got -1.0"),
        ({"persistence": 0.9}, "persistence must lie between 1 and 2, got 0.9"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Stationary(**settings)


def test_too_few_positions():
    with pytest.raises(ValueError, match="positions must have at least 8 intervals, got 3"):
        assess(np.zeros((4, 2)))


def scheduled(**kwargs):
    model = Quadratic(torch.full((20,), 0.5), noise=torch.ones(20), lr=0.1)
    theta = nn.Parameter(torch.full((20,), 3.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    scheduler = eq.FDRScheduler(optimizer, factor=0.5, min_steps=20, **kwargs)
    return model, theta, optimizer, scheduler


def advance(run, epochs, seed=0):
    model, theta, optimizer, scheduler = run
    generator, lowered = torch.Generator().manual_seed(seed), []
    for _ in range(epochs):
        for _ in range(20):
            theta.grad = model.gradient(theta, generator)
            optimizer.step()
        scheduler.step()
        lowered.append(scheduler.last_decision.lowered)
    return lowered


def test_the_scheduler_lowers_on_a_quadratic_and_survives_a_checkpoint(tmp_path):
    run = scheduled(rule=Stationary(), every=1)
    lowered = advance(run, 40)
    # A relaxation takes 20 steps, hence an epoch; six and the persistence must have passed.
    assert 7 <= lowered.index(True) + 1 <= 30
    assert run[3].get_last_lr() == [0.1 * 0.5 ** sum(lowered)]
    torch.save(run[3].state_dict(), tmp_path / "state.pt")
    other = scheduled(rule=Stationary(relaxations=3.0), every=1)
    other[3].load_state_dict(torch.load(tmp_path / "state.pt"))
    assert other[3].rule == Stationary()
    assert other[3].last_decision == run[3].last_decision


def test_a_rule_gets_what_it_needs_or_an_error():
    theta = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    assert eq.FDRScheduler(optimizer, rule=Stationary()).monitor.traces
    assert not eq.FDRScheduler(optimizer).monitor.traces
    monitor = eq.Monitor(optimizer)
    with pytest.raises(ValueError, match=r"Stationary needs a trace.*eq.Monitor\(optimizer, trace"):
        eq.FDRScheduler(optimizer, rule=Stationary(), monitor=monitor)

    @dataclass(frozen=True)
    class Asking:
        needs: ClassVar[frozenset[str]] = frozenset({"weather"})

        def judge(self, reading):
            return Verdict(False, "")

    with pytest.raises(ValueError, match="Asking needs weather, which FDRScheduler does not prov"):
        eq.FDRScheduler(optimizer, rule=Asking())


def test_a_rule_of_ones_own_in_five_lines():
    @dataclass(frozen=True)
    class Settled:
        needs: ClassVar[frozenset[str]] = frozenset({"trace"})

        def judge(self, reading):
            late = slice(len(reading.trace) // 2, None)
            moved = displacement(reading.trace.positions[late], reading.trace.free[late])
            return Verdict(bool(moved > -0.2), f"moved {-moved:.2f} times as far as by noise")

    assert any(advance(scheduled(rule=Settled(), every=1), 20))
