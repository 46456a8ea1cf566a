"""Rules are pure: a reading goes in, a verdict with its reason comes out."""

import math

import pytest

import equilibrate as eq
from equilibrate.rules import Rule, Threshold, check_factor


def reading(left, right, count=100, **error):
    return eq.Reading(step=2 * count, count=count, left=left, right=right, lr=0.1, **error)


@pytest.mark.parametrize(
    ("given", "act", "reason"),
    [
        (reading(1.0, 1.0), True, "equilibrated: |L/R − 1| = 0 < 0.01"),
        (reading(1.0099, 1.0), True, "equilibrated: |L/R − 1| = 0.0099 < 0.01"),
        (reading(0.5, 1.0), False, "not yet: |L/R − 1| = 0.5 ≥ 0.01"),
        (reading(1.02, 1.0), False, "not yet: |L/R − 1| = 0.02 ≥ 0.01"),
        (reading(0.0, 0.0), False, "undefined: both sides are zero"),
        (reading(math.nan, 1.0), False, "undefined: non-finite averages (left nan"),
        (reading(1.0, math.inf), False, "undefined: non-finite averages"),
        (reading(math.nan, math.nan, count=0), False, "undefined: no step has been seen yet"),
    ],
)
def test_threshold(given, act, reason):
    verdict = Threshold(0.01).judge(given)
    assert verdict.act is act
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize(
    ("left", "act", "reason"),
    [
        (
            1.02,
            False,
            "not yet: |L/R − 1| = 0.02 ≥ 0.01, but the standard error, 0.03",
        ),
        (1.009, True, "equilibrated: |L/R − 1| = 0.009 < 0.01 (standard error 0.03)"),
        (1.2, False, "not yet: |L/R − 1| = 0.2 ≥ 0.01"),  # a drift
    ],
)
def test_a_threshold_decides_as_in_the_paper_and_mentions_noise(left, act, reason):
    verdict = Threshold(0.01).judge(reading(left, 1.0, stderr=0.03, margin=0.06))
    assert verdict.act is act
    more = ", is above 0.01 too, for about 400 more steps"
    assert verdict.reason == reason + (more if reason.endswith("error, 0.03") else "")
    quiet = Threshold(0.01).judge(reading(left, 1.0, stderr=0.01, margin=0.02))
    assert quiet == Threshold(0.01).judge(reading(left, 1.0))


def test_the_threshold_itself_is_not_below_it():
    assert not Threshold(0.5).judge(reading(1.5, 1.0)).act


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_wrong_thresholds(value):
    with pytest.raises(ValueError, match=f"threshold must be a positive number .* got {value}"):
        Threshold(value)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, math.nan])
def test_wrong_factors(value):
    with pytest.raises(ValueError, match=f"factor must lie between 0 and 1, .* got {value}"):
        check_factor(value)


def test_threshold_is_a_rule():
    assert isinstance(Threshold(), Rule)
    assert not isinstance(0.01, Rule)
