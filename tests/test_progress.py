"""How a loss goes on is told from its past, with error bars that cover."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibrate.forecast.progress import fit, longest_agreeing


def curve(losses, ahead):
    """Fit single losses of successive steps, of which the later half is known."""
    steps = np.arange(len(losses)) + 0.5
    half = len(losses) // 2
    return fit(steps[half:], losses[half:], np.ones(len(losses) - half), len(losses), ahead)


@pytest.mark.parametrize("power", [-0.5, 0.0, 0.5, 1.0, 2.0])
def test_a_law_of_the_family_is_continued_exactly(power):
    t = np.arange(2000) + 0.5
    law = {0.0: lambda u: -np.log(u / 2000)}.get(
        power, lambda u: ((u / 2000) ** -power - 1) / power
    )
    found = curve(3 + 0.2 * law(t), ahead=500)
    assert found is not None
    assert found.now == pytest.approx(3 + 0.2 * law(2000.0), abs=1e-4)
    for begin, end in ((1800, 2000), (2000, 2500), (2000, 6000)):
        expected = 0.2 * (law(float(begin)) - law(float(end)))
        assert found.fall(begin, end)[0] == pytest.approx(expected, rel=0.01)


@given(
    scale=st.floats(0.1, 10), shift=st.floats(-5, 5), seed=st.integers(0, 100), size=st.just(400)
)
@settings(max_examples=25, deadline=None)
def test_units_and_level_of_the_loss_do_not_matter(scale, shift, seed, size):
    losses = 1 + np.random.default_rng(seed).normal(0, 0.1, size) + 30 / (np.arange(size) + 30)
    one, other = curve(losses, 100), curve(scale * losses + shift, 100)
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
        found = curve(2 * (t / 100) ** -exponent + noise, ahead=400)
        assert found is not None
        value, error = found.fall(1600, 2000)
        truth = 2 * (16**-exponent - 20**-exponent)
        covered.append(abs(value - truth) < 2 * error)
    assert np.mean(covered) >= 0.9


def test_a_sudden_fall_is_left_out_of_the_window():
    t = np.arange(2000) + 0.5
    losses = 3 - 1e-4 * t - 1.0 * (t > 1300)
    noisy = losses + np.random.default_rng(0).normal(0, 0.05, 2000)
    found = curve(noisy, ahead=400)
    assert found is not None
    assert found.start > 1300
    assert found.fall(2000, 2400)[0] == pytest.approx(0.04, abs=0.02)


def test_too_few_losses():
    assert curve(np.ones(10), 5) is None
    assert curve(np.ones(2000), 5) is not None


def test_the_longest_window_that_agrees_is_taken():
    assert longest_agreeing([]) is None
    assert longest_agreeing([(1.0, 0.5, "a"), (1.2, 0.2, "b"), (2.0, 0.1, "c")]) == "b"
    assert longest_agreeing([(1.0, 0.5, "a"), (2.0, 0.1, "b"), (1.0, 0.5, "c")]) == "a"
