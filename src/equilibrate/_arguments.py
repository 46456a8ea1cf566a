"""Checks numbers that users pass."""

from __future__ import annotations

import operator
from typing import Any


def check_steps(name: str, steps: Any, least: int = 1) -> int:
    """Check a number of steps.

    Args:
        name: The name of the argument.
        steps: Its value, a whole number of any kind, such as NumPy's, or a float like `1e4`.
        least: The smallest number that it may be.

    Returns:
        The number, as an int.

    Raises:
        ValueError: If it is not a whole number, or too small.
    """
    try:
        is_whole = isinstance(steps, float) and steps.is_integer()
        whole: Any = int(steps) if is_whole else steps
        number = operator.index(whole)
    except TypeError:
        number = least - 1
    if number < least or isinstance(steps, bool):
        raise ValueError(f"{name} must be a whole number of steps, at least {least}, got {steps!r}")
    return number


def lies_between(value: Any, low: float, high: float) -> bool:
    """Return whether a value is a number between two others, which it must not equal.

    Args:
        value: The value, which may be of any type.
        low: The lower number.
        high: The higher number; infinity, if the value must only be finite.

    Returns:
        Whether it is. A number in a string is not one.
    """
    try:
        return not isinstance(value, str) and low < float(value) < high
    except (TypeError, ValueError):  # not a number
        return False
