"""Curves of braille characters, dot by dot."""

import math

from hypothesis import given
from hypothesis import strategies as st

from equilibrate.report.braille import chart


def dots(lines):
    """The marked dots as (column, row from the top)."""
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]
    return {
        (2 * x + dx, 4 * y + dy)
        for y, line in enumerate(lines)
        for x, character in enumerate(line)
        for bit, (dx, dy) in enumerate(order)
        if (ord(character) - 0x2800) >> bit & 1
    }


def test_a_diagonal():
    values = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert dots(chart(values, width=4, height=2, low=0, high=7)) == {(k, 7 - k) for k in range(8)}


def test_a_gap_interrupts_the_curve_and_values_outside_lie_on_the_border():
    values = [-5.0, None, math.nan, 50.0]
    assert dots(chart(values, width=2, height=1, low=0, high=3)) == {(0, 3), (3, 0)}


def test_a_logarithmic_scale():
    values = [1.0, 10.0, 100.0, 1000.0]
    lines = chart(values, width=2, height=1, low=1, high=1000, transform=math.log)
    assert dots(lines) == {(0, 3), (1, 2), (2, 1), (3, 0)}


@given(st.lists(st.none() | st.floats(-10, 10), max_size=50), st.integers(1, 20), st.integers(1, 6))
def test_every_value_is_marked_where_it_belongs(values, width, height):
    found = dots(chart(values, width=width, height=height, low=-10, high=10))
    for i, value in enumerate(values):
        if value is not None:
            x = round(i * (2 * width - 1) / max(1, len(values) - 1))
            y = round((10 - value) / 20 * (4 * height - 1))
            assert any(column == x and abs(row - y) <= 1 for column, row in found)
    if all(value is None for value in values):
        assert not found
