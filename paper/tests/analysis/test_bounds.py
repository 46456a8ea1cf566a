"""Bounds decide by the whole interval, and print the numbers that they apply."""

import math

import pytest

from equilibrate.estimates import Estimate
from equilibrate_paper.analysis.bounds import Agreement, Interval


def estimate(value, margin):
    return Estimate(value, margin / 2, margin=margin)


@pytest.mark.parametrize(
    ("bound", "value", "margin", "decided"),
    [
        (Interval(-1, 1), 0.5, 0.4, True),
        (Interval(-1, 1), 0.5, 0.6, None),
        (Interval(-1, 1), -2.0, 0.9, False),
        (Interval(-1, 1), 2.0, 1.0, False),
        (Interval(low=0), 0.5, 0.4, True),
        (Interval(low=0), 0.5, 0.5, None),
        (Interval(high=0), 0.5, 0.4, False),
        (Interval(high=0), 0.5, math.nan, None),
    ],
)
def test_an_interval_decides_unless_the_estimate_straddles_an_end(bound, value, margin, decided):
    assert bound.decide(estimate(value, margin)) is decided


@pytest.mark.parametrize(
    ("value", "margin", "decided"),
    [
        (0.05, 0.06, True),
        (-0.05, 0.06, True),
        (0.05, 0.04, False),
        (-0.05, 0.04, False),
        (0.05, 0.16, None),
        (0.0, math.nan, None),
    ],
)
def test_agreement_needs_a_narrow_interval_that_covers_zero(value, margin, decided):
    assert Agreement(0.2, comparisons=6).decide(estimate(value, margin)) is decided
