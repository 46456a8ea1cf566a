"""Losses handed over, and the slope of a line through them with an honest error."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibrate.gains import Losses, blocks


def line(count, slope=0.001, interval=10, start=0, noise=()):
    steps = tuple(start + interval * (k + 1) for k in range(count))
    noise = noise if len(noise) else np.zeros(count)
    return Losses(start, steps, tuple(2 - slope * s + e for s, e in zip(steps, noise, strict=True)))


@given(
    count=st.integers(5, 300),
    slope=st.floats(-1, 1),
    interval=st.integers(1, 1000),
    start=st.integers(0, 10_000),
)
def test_the_fall_of_a_straight_line_is_its_slope(count, slope, interval, start):
    fall = line(count, slope, interval, start).fall(since=start)
    scale = abs(slope) + 2 / (count * interval) + abs(slope) * start / (count * interval)
    assert fall.value == pytest.approx(slope, abs=1e-9 * scale)


def test_only_losses_of_intervals_after_the_given_step_are_used():
    values = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0, 4.0, 4.0, 4.0)
    losses = Losses(0, tuple(range(10, 110, 10)), values)
    assert losses.fall(50).value == pytest.approx(0, abs=1e-12)
    assert losses.fall(0).value > 0
    few = losses.fall(60)
    assert math.isnan(few.value)
    assert few.method == "4 of 5 losses since step 60"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_finite(bad):
    losses = Losses(0, tuple(range(1, 9)), (1.0,) * 7 + (bad,))
    assert losses.fall(0).method == "losses are not finite"
    assert math.isnan(losses.fall(0).value)


@pytest.mark.parametrize(
    ("count", "horizon", "window"),
    [
        (100, 40, 500),  # the later half
        (100, 700, 700),  # but a horizon after the lowering
        (6, 5, 10),  # and at least five losses
        (8, 35, 35),
        (3, 5, 5),
    ],
)
def test_the_window(count, horizon, window):
    assert line(count).window(horizon) == window
    assert line(count, start=1000).window(horizon) == 1000 + window


@pytest.mark.parametrize(("count", "correlation"), [(8, 0.0), (400, 0.0), (400, 0.9)])
def test_error_bars_of_the_slope(count, correlation):
    """Of 1500 series at least 93 % of the 95 % intervals hold the slope; none is far too wide.

    For a coverage of 95 % the limit is 3.5 standard deviations away: one seed in 4000 would fail.
    """
    random = np.random.default_rng(0)
    noise = random.normal(size=(1500, count + 100))
    for k in range(1, count + 100):
        noise[:, k] += correlation * noise[:, k - 1]
    falls = [line(count, noise=row[100:]).fall(0) for row in noise]
    assert np.mean([fall.covers(0.001) for fall in falls]) >= 0.93
    spread = np.std([fall.value for fall in falls])
    assert np.mean([fall.stderr for fall in falls]) < 1.6 * spread


def test_blocks_keep_the_end_of_a_series():
    assert blocks(range(47)).tolist() == [2 * k + 1.5 for k in range(23)]
    assert blocks(range(400)).tolist() == [20 * k + 9.5 for k in range(20)]


def test_losses_of_one_step_have_no_slope():
    found = Losses(0, (5,) * 8, (1.0,) * 8).fall(since=5)
    assert math.isnan(found.value)
    assert found.method == "all losses are of the same step"
