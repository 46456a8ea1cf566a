"""Curves drawn with braille characters, each of which has two by four dots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of the dot in each row and column of a character."""


def chart(
    values: Sequence[float | None],
    *,
    width: int,
    height: int,
    low: float,
    high: float,
    transform: Callable[[float], float] = lambda value: value,
) -> list[str]:
    """Draw a curve through values at equal distances.

    >>> for line in chart([0.0, 1.0, 0.0], width=5, height=1, low=0.0, high=1.0):
    ...     print(line)
    ⡠⠔⠑⠢⢄

    Args:
        values: The values; None interrupts the curve.
        width: Width in characters.
        height: Height in characters.
        low: The value at the bottom. Smaller ones are drawn there.
        high: The value at the top. Larger ones are drawn there.
        transform: The vertical scale, such as `math.log`.

    Returns:
        The lines from top to bottom.
    """
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    bottom, top = transform(low), transform(high)
    size = (top - bottom) or 1.0

    def row(value: float) -> int:
        share = (transform(min(max(value, low), high)) - bottom) / size
        return round((1 - share) * (rows - 1))

    def mark(x: int, y: int) -> None:
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    last: tuple[int, int] | None = None
    for i, value in enumerate(values):
        if value is None or not math.isfinite(value):
            last = None
            continue
        x = round(i * (columns - 1) / max(1, len(values) - 1))
        point = x, row(value)
        for between in _line(last or point, point):
            mark(*between)
        last = point
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def like(dots: int) -> str:
    """Return the character of ASCII that is most like one of braille.

    >>> [like(dots) for dots in (0x00, 0x01, 0x02, 0x40, 0x41)]
    [' ', "'", '-', '.', '|']

    Args:
        dots: The bits of its dots.

    Returns:
        A space, or one that shows whether the dots lie high, low, in the middle or in several rows.
    """
    high, upper, lower, low = (bool(dots & (left | right)) for left, right in _DOTS)
    if high + upper + lower + low == 0:
        return " "
    if high and not (lower or low):
        return "'"
    if low and not (high or upper):
        return "."
    return "|" if high or low else "-"


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight line, at least one in each row and column."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    if steps == 0:
        return [end]
    return [
        (
            round(start[0] + (end[0] - start[0]) * k / steps),
            round(start[1] + (end[1] - start[1]) * k / steps),
        )
        for k in range(steps + 1)
    ]
