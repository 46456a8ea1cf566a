"""What a reading says about its error bar."""

import math
from dataclasses import replace

import pytest

import equilibrate as eq
from equilibrate.readings import check_threshold, in_words

NOISY = eq.Reading(800, 400, left=1.04, right=1.0, lr=0.1, stderr=0.03, margin=0.07)


def test_the_interval_is_symmetric_about_the_residual():
    assert NOISY.interval == pytest.approx((-0.03, 0.11))
    bare = eq.Reading(800, 400, left=1.04, right=1.0, lr=0.1)
    assert all(map(math.isnan, (bare.stderr, bare.margin, *bare.interval)))


def test_the_text_shows_the_interval_if_there_is_one():
    assert repr(NOISY).endswith("residual=0.040 ± 0.070)")
    assert repr(replace(NOISY, margin=math.nan)).endswith("residual=0.04)")
    assert repr(replace(NOISY, left=1.0, margin=0.0)).endswith("residual=0 ± 0)")


def test_readings_with_equal_averages_are_equal():
    assert replace(NOISY, stderr=math.nan, margin=0.1) == NOISY
    assert replace(NOISY, left=1.05) != NOISY


def test_the_error_falls_with_the_number_of_steps():
    assert NOISY.further_steps(0.03) == 0
    assert NOISY.further_steps(0.01) == 1600
    unknown = replace(NOISY, stderr=math.nan)
    assert math.isnan(unknown.further_steps(0.01))


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, math.inf])
def test_wrong_thresholds(threshold):
    with pytest.raises(ValueError, match=f"threshold must be a positive .* got {threshold}"):
        check_threshold(threshold)


@pytest.mark.parametrize(
    ("steps", "text"),
    [(0, "0"), (7, "7"), (99, "99"), (149, "150"), (996, "1,000"), (1e6, "1,000,000")],
)
def test_numbers_of_steps_have_two_digits(steps, text):
    assert in_words(steps) == text
