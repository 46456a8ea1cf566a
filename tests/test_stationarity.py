"""`Stationary`: statistics of exact processes, a trace of sketches, decisions with reasons."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import equilibrate as eq
from equilibrate.solvable import Quadratic
from equilibrate.stationarity import Stationary
from equilibrate.stationarity.statistics import assess, squared_path
from equilibrate.stationarity.trace import CAPACITY, WIDTH

READING = eq.Reading(step=99, count=50, left=1.0, right=1.0, lr=0.1)


def ornstein_uhlenbeck(repetitions, dimensions, relaxations, *, offset=0.0, points=100, seed=0):
    """Return exact positions of a process with unit variance and some relaxation times."""
    rng = np.random.default_rng(seed)
    rate = relaxations / points
    keep = math.exp(-rate)
    x = np.empty((repetitions, points + 1, dimensions))
    x[:, 0] = offset + (rng.standard_normal((repetitions, dimensions)) if not offset else 0)
    for i in range(points):
        noise = rng.standard_normal((repetitions, dimensions))
        x[:, i + 1] = keep * x[:, i] + math.sqrt(1 - keep**2) * noise
    return x


def walk(repetitions, dimensions, *, drift=0.0, points=100, seed=0):
    rng = np.random.default_rng(seed)
    steps = drift + rng.standard_normal((repetitions, points, dimensions))
    return np.concatenate([np.zeros((repetitions, 1, dimensions)), steps.cumsum(1)], 1)


# Statistics -----------------------------------------------------------------------------------


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
        found = assess(ornstein_uhlenbeck(400, 20, true))
        assert true * 0.8 < np.median(found.relaxations) < true + 3.5
    far = assess(ornstein_uhlenbeck(400, 20, 10.0, offset=30.0))
    assert np.median(far.relaxations) == pytest.approx(10, rel=0.1)
    assert np.median(far.start) > 0.3
    # The window is chosen for a small spread, which lowers the share of a walk by about 0.15.
    assert 0.7 < np.median(assess(walk(400, 50)).diffusing) < 1


@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-5, 5), seed=st.integers(0, 20))
def test_units_and_origin_do_not_matter(scale, shift, seed):
    x = ornstein_uhlenbeck(2, 3, 8.0, points=40, seed=seed)
    one, other = assess(x), assess(scale * (x + shift))
    for name in ("relaxations", "significance", "diffusing", "error", "start"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=1e-9)


def test_a_batch_equals_its_members():
    x = ornstein_uhlenbeck(6, 3, 8.0, offset=5.0)
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
    assert rule.satisfied(walk(1000, 20)).sum() <= 16
    assert rule.satisfied(walk(1000, 20, drift=0.3)).sum() == 0
    assert rule.satisfied(ornstein_uhlenbeck(1000, 20, 1.5)).sum() <= 16
    assert rule.satisfied(ornstein_uhlenbeck(1000, 20, 20.0)).mean() > 0.9


class Recorded(Stationary):
    """The rule with a trace that is given."""

    def __init__(self, given, **settings):
        super().__init__(**settings)
        self.given = given

    @property
    def positions(self):
        return self.given


def test_decisions_say_why():
    def judge(positions, reading=READING, **settings):
        return Recorded(positions, **settings).judge(reading)

    (x,) = ornstein_uhlenbeck(1, 20, 30.0)
    acts, reason = judge(x)
    assert acts
    assert reason.startswith("stationary for ")
    assert judge(walk(1, 20, drift=1.0)[0])[1].startswith("not yet: it drifts ")
    assert judge(walk(1, 20)[0])[1].startswith("diffusing: ")
    (x,) = ornstein_uhlenbeck(1, 1, 12.0)
    weak = {"significance": 99, "diffusing": 5.0, "relaxations": 1.0}
    assert "of 99 standard errors" in judge(x, **weak)[1]
    assert "of 999 relaxation times have passed" in judge(x, **{**weak, "relaxations": 999.0})[1]
    assert judge(x[:5]) == (False, "not yet: 5 of 11 positions are recorded")
    assert "do not move" in judge(0 * x)[1]
    assert "both sides are zero" in judge(x, replace(READING, left=0.0, right=0.0))[1]


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


# The trace ------------------------------------------------------------------------------------


def followed(steps, *, every=1, size=5, dtype=torch.float64, seed=0, watched=None, **settings):
    """Train on noise around a minimum; return the rule, its monitor and all positions.

    The rule follows before the first step and after every `every`-th.
    """
    if watched is None:
        theta = nn.Parameter(torch.linspace(-1, 1, size, dtype=dtype))
        watched = Stationary(), eq.Monitor(torch.optim.SGD([theta], lr=0.1, **settings))
    rule, monitor = watched
    (theta,) = monitor.optimizer.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(seed)
    seen = [theta.detach().clone()]
    rule.follow(monitor)
    for step in range(1, steps + 1):
        noise = torch.randn(theta.shape, generator=generator, dtype=torch.float64)
        theta.grad = (0.5 * theta.detach().double() + noise).to(theta.dtype)
        monitor.optimizer.step()
        seen.append(theta.detach().clone())
        if step % every == 0:
            rule.follow(monitor)
    return rule, monitor, torch.stack(seen).double()


def squares(x):
    return ((x[:, None] - x) ** 2).sum(-1)


def test_distances_of_few_numbers_are_exact_in_units_of_the_learning_rate():
    rule, monitor, seen = followed(100)
    expected = squares(seen.numpy()) / 0.2
    assert squares(rule.positions) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    rule.follow(monitor)  # a second time at the same step
    assert rule.positions.shape == (101, WIDTH)


def test_distances_of_many_numbers_are_unbiased_with_the_stated_variance():
    """2,000 independent steps: the mean is 5 standard errors from 1 in 6e-7 of cases."""
    theta = nn.Parameter(torch.zeros(500, dtype=torch.float64))
    monitor = eq.Monitor(torch.optim.SGD([theta], lr=0.5))
    ratios = []
    for _ in range(20):
        rule = Stationary()
        monitor.reset()
        rule.follow(monitor)
        for _ in range(100):
            theta.grad = torch.randn(500, dtype=torch.float64)
            monitor.optimizer.step()
            rule.follow(monitor)
            moved = np.diff(rule.positions[-2:], axis=0)
            ratios.append((moved**2).sum() / (0.25 * theta.grad.square().sum().item()))
    assert abs(np.mean(ratios) - 1) < 5 * math.sqrt(2 / WIDTH / 2000)
    assert np.var(ratios) == pytest.approx(2 / WIDTH, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {}),
    ],
)
def test_groups_are_scaled_by_their_effective_learning_rates(kind, settings):
    """A free walk of noise grows as fast in a group with four times the learning rate, per η′."""
    params = [nn.Parameter(torch.zeros(1000, dtype=torch.float64)) for _ in range(2)]
    grown = []
    for p, lr in zip(params, (0.01, 0.04), strict=True):
        monitor, rule = eq.Monitor(kind([p], lr=lr, **settings)), Stationary()
        rule.follow(monitor)
        generator = torch.Generator().manual_seed(0)
        for step in range(1, 1601):
            p.grad = torch.randn(1000, generator=generator, dtype=torch.float64)
            monitor.optimizer.step()
            if step % 320 == 0:
                rule.follow(monitor)
        grown.append(squared_path(rule.positions)[-1])
    assert grown[1] / grown[0] == pytest.approx(4, rel=0.05)


def test_memory_is_bounded_and_spacing_doubles():
    rule, _, seen = followed(700)
    assert len(rule.positions) == 88 <= CAPACITY
    expected = squares(seen[::8].numpy()) / 0.2
    assert squares(rule.positions) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_the_same_with_a_trace(dtype):
    state = torch.get_rng_state()
    often, rarely = followed(40, dtype=dtype)[2], followed(40, every=40, dtype=dtype)[2]
    assert torch.equal(often, rarely)
    assert torch.equal(state, torch.get_rng_state())


def test_a_changed_learning_rate_restarts_it_and_so_does_a_reset():
    rule, monitor, _ = followed(50)
    monitor.optimizer.param_groups[0]["lr"] = 0.05
    followed(10, watched=(rule, monitor))
    assert len(rule.positions) == 11
    monitor.reset()
    followed(3, watched=(rule, monitor))
    assert len(rule.positions) == 4


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}])
def test_a_resumed_trace_equals_an_uninterrupted_one(tmp_path, settings):
    rule, monitor, _ = followed(300, **settings)
    optimizer = monitor.optimizer
    torch.save([p.state_dict() for p in (rule, monitor, optimizer)], tmp_path / "state.pt")
    saved, of_monitor, of_optimizer = torch.load(tmp_path / "state.pt")
    (theta,) = optimizer.param_groups[0]["params"]
    other = torch.optim.SGD([nn.Parameter(theta.detach().clone())], lr=0.1, **settings)
    other.load_state_dict(of_optimizer)
    resumed = Stationary(), eq.Monitor(other)
    resumed[1].load_state_dict(of_monitor)
    resumed[0].load_state_dict(saved, resumed[1])
    followed(200, watched=(rule, monitor), seed=1)
    followed(200, watched=resumed, seed=1)
    assert (resumed[0].positions == rule.positions).all()


# Decisions ------------------------------------------------------------------------------------


def scheduled(rule):
    model = Quadratic(torch.full((20,), 0.5), noise=torch.ones(20), lr=0.1)
    theta = nn.Parameter(torch.full((20,), 3.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    return model, theta, optimizer, eq.FDRScheduler(optimizer, factor=0.5, rule=rule, min_steps=20)


def advance(run, epochs):
    model, theta, optimizer, scheduler = run
    generator, lowered = torch.Generator().manual_seed(0), []
    for _ in range(epochs):
        for _ in range(20):
            theta.grad = model.gradient(theta, generator)
            optimizer.step()
        before = scheduler.get_last_lr()
        scheduler.step()
        lowered.append(scheduler.get_last_lr() < before)
    return lowered


def test_the_scheduler_lowers_on_a_quadratic_and_survives_a_checkpoint(tmp_path):
    run = scheduled(Stationary())
    lowered = advance(run, 40)
    # A relaxation takes 20 steps, hence an epoch; six and the persistence must have passed.
    assert 7 <= lowered.index(True) + 1 <= 30
    assert run[3].get_last_lr() == [0.1 * 0.5 ** sum(lowered)]
    torch.save(run[3].state_dict(), tmp_path / "state.pt")
    other = scheduled(Stationary(relaxations=3.0))
    other[3].load_state_dict(torch.load(tmp_path / "state.pt"))
    assert other[3].rule == Stationary()
    assert (other[3].rule.positions == run[3].rule.positions).all()
    assert other[3].last_decision == run[3].last_decision


BATCHES = 40


@pytest.mark.parametrize("seed", range(4))
def test_what_cancels_within_an_epoch_is_not_taken_for_a_restoring_force(seed):
    """Least squares on reshuffled data, whose noise cancels within each epoch.

    Directions relax in a fifth of an epoch and in thirty epochs.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -2.2, 10, dtype=torch.float64).sqrt()
    inputs = torch.randn(BATCHES * 8, 10, generator=generator, dtype=torch.float64) * scales
    noise = torch.randn(len(inputs), generator=generator, dtype=torch.float64)
    targets = inputs @ (1 / scales) + noise
    theta = nn.Parameter(torch.zeros(10, dtype=torch.float64))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    scheduler = eq.FDRScheduler(optimizer, rule=Stationary(), min_steps=BATCHES)
    best = torch.linalg.lstsq(inputs, targets[:, None]).solution[:, 0]
    for _ in range(25):
        for batch in torch.randperm(len(inputs), generator=generator).view(BATCHES, -1):
            optimizer.zero_grad()
            (inputs[batch] @ theta - targets[batch]).square().mean().div(2).backward()
            optimizer.step()
        scheduler.step()
    assert ((theta - best)[-1] / best[-1]).abs().item() > 0.3  # still on its way
    assert scheduler.get_last_lr() == [0.1]
    assert len(scheduler.rule.positions) == 26  # the start, and each epoch's end
