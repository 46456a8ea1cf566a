"""Numbers are rounded to their margins."""

import math

import pytest

from equilibrate.estimates import Estimate
from equilibrate.report.numbers import format_estimate, format_number


@pytest.mark.parametrize(
    ("value", "margin", "text"),
    [
        (None, None, "–"),
        (math.nan, 0.1, "–"),
        (1.0, 0.0, "1"),
        (1.0, math.nan, "1"),
        (-1.342, 0.261, "−1.34 ± 0.26"),
        (123.4, 20.0, "123 ± 20"),
        (1e-9, 2e-10, "1e−09 ± 2e−10"),
        (0.96, 0.096, "0.960 ± 0.096"),
        (-0.000189, 8.6e-6, "−0.0001890 ± 0.0000086"),
    ],
)
def test_numbers_are_rounded_to_the_second_digit_of_the_margin(value, margin, text):
    assert format_number(value, margin) == text


def test_an_estimate_is_formatted_with_its_margin():
    assert format_estimate(Estimate(0.5, 0.1)) == "0.50 ± 0.20"
    assert format_estimate(Estimate(0.5, math.nan)) == "0.5"
