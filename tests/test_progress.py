"""How a loss goes on is told from its past, with error bars that cover."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibrate.forecast.progress import fit


def curve(losses):
    """Fit single losses of successive steps, of which the later half is known."""
    steps = np.arange(len(losses)) + 0.5
    half = len(losses) // 2
    return fit(steps[half:], losses[half:], np.ones(len(losses) - half), len(losses))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_a_power_law_is_continued_exactly(power):
    t = np.arange(2000) + 0.5
    law = {0.0: lambda u: -np.log(u / 2000)}.get(
        power, lambda u: ((u / 2000) ** -power - 1) / power
    )
    found = curve(3 + 0.2 * law(t))
    assert found is not None
    assert found.now == pytest.approx(3 + 0.2 * law(2000.0), abs=1e-4)
    past = np.array([900.0, 1200.0, 1800.0])
    assert found.past(past) == pytest.approx(3 + 0.2 * law(past), abs=2e-3)
    for begin, end in ((2000, 2500), (2300, 6000)):
        expected = 0.2 * (law(float(begin)) - law(float(end)))
        assert found.fall(begin, end)[0] == pytest.approx(expected, rel=0.01)
        assert found.fall(end, begin)[0] == -found.fall(begin, end)[0]


class Twin:
    """The posterior of a curve from samples of random curves: no formula is shared."""

    def __init__(self, z, y, ahead, wandering, draws=200_000):
        random = np.random.default_rng(0)
        grid = np.concatenate([np.linspace(z[0], ahead[-1], 400), z, ahead])
        grid = np.unique(grid)
        steps = np.diff(grid)
        level, slope = random.normal(0, 4, (2, draws))
        f, paths = level.copy(), {grid[0]: level.copy()}
        for at, h in zip(grid[1:], steps, strict=True):
            kick = random.normal(0, np.sqrt(wandering * h), draws)
            f, slope = f + h * slope + h * kick / 2, slope + kick
            paths[at] = f.copy()
        weight = sum((paths[a] - b) ** 2 for a, b in zip(z, y, strict=True)) / -2
        weight = np.exp(weight - weight.max())
        fall = paths[ahead[0]] - paths[ahead[1]]
        self.mean = weight @ fall / weight.sum()
        self.sd = np.sqrt(weight @ (fall - self.mean) ** 2 / weight.sum())


def test_one_curve_is_the_posterior_of_an_integrated_wiener_process(monkeypatch):
    """Against a million random curves, weighted by how well they fit ten losses of unit noise."""
    monkeypatch.setattr("equilibrate.forecast.progress._POWERS", (0.0,))
    monkeypatch.setattr("equilibrate.forecast.progress._WANDERING", (30.0,))
    x = np.linspace(0.5, 0.99, 10)
    z = np.log(x)
    y = np.array([1.0, 0.2, 0.4, -1.1, -0.3, -1.5, -0.9, -2.2, -1.6, -2.9])
    found = fit(1000 * x, y, np.ones(10), 1000)
    assert found is not None
    twin = Twin(z, y, np.log([1.1, 1.3]), wandering=30.0, draws=1_000_000)
    value, error = found.fall(1100, 1300)
    (wandering,) = found.wandering
    variance = wandering / 30.0  # estimated; the twin has one
    assert value == pytest.approx(twin.mean, abs=0.05 * twin.sd)
    assert error / np.sqrt(variance) == pytest.approx(twin.sd, rel=0.03)


@given(
    scale=st.floats(0.1, 10), shift=st.floats(-5, 5), seed=st.integers(0, 100), size=st.just(400)
)
@settings(max_examples=25, deadline=None)
def test_units_and_level_of_the_loss_do_not_matter(scale, shift, seed, size):
    losses = 1 + np.random.default_rng(seed).normal(0, 0.1, size) + 30 / (np.arange(size) + 30)
    one, other = curve(losses), curve(scale * losses + shift)
    assert one is not None
    assert other is not None
    expected = [scale * number for number in one.fall(400, 500)]
    assert other.fall(400, 500) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert other.now == pytest.approx(scale * one.now + shift, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("exponent", [0.3, 0.7, 1.5])
def test_intervals_of_the_fall_cover(exponent):
    """Of 200 series at least 90 % at two standard errors: 95 % would have a deviation of 1.5 %."""
    t = np.arange(1600) + 0.5
    covered = []
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(0, 0.1, 1600)
        found = curve(2 * (t / 100) ** -exponent + noise)
        assert found is not None
        value, error = found.fall(1600, 2000)
        truth = 2 * (16**-exponent - 20**-exponent)
        covered.append(abs(value - truth) < 2 * error)
    assert np.mean(covered) >= 0.9


def test_a_sudden_fall_makes_the_error_larger():
    """The slope after it counts, and that it may change again."""
    t = np.arange(2000) + 0.5
    losses = 3 - 1e-4 * t + np.random.default_rng(0).normal(0, 0.05, 2000)
    calm, fallen = curve(losses), curve(losses - 1.0 * (t > 1300))
    assert calm is not None
    assert fallen is not None
    (quiet, small), (value, large) = calm.fall(2000, 2400), fallen.fall(2000, 2400)
    assert quiet == pytest.approx(0.04, abs=2 * small)
    assert value == pytest.approx(0.04, abs=2 * large)
    assert large > 3 * small


def test_the_loss_and_its_fall_are_known_together():
    """What a loss to come has of the present and of the slope is one Gaussian."""
    noise = np.random.default_rng(0).normal(0, 0.1, 1600)
    found = curve(2 * ((np.arange(1600) + 0.5) / 100) ** -0.7 + noise)
    assert found is not None
    now, least = found.loss(1600)
    assert now == pytest.approx(found.now)
    for step in (1900, 2400):
        value, error = found.loss(step)
        assert value == pytest.approx(found.now - found.fall_over(step - 1600))
        assert error >= least


def test_numbers_that_overflow():
    with np.errstate(all="ignore"):
        assert curve(np.linspace(2e160, 1e160, 400)) is None


def test_too_few_losses():
    assert curve(np.ones(10)) is None
    assert curve(np.ones(2000)) is not None
    assert fit(np.ones(9), np.ones(9), np.zeros(9), 100) is None
