"""Numbers as text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from equilibrate.estimates import Estimate

_MOST_PLACES = 7


def format_number(value: float | None, margin: float | None = None) -> str:
    """Format a value with its margin of error, rounded to the margin's second digit.

    >>> format_number(0.012345, 0.0021), format_number(0.5), format_number(97.1, 3.0)
    ('0.0123 ± 0.0021', '0.5', '97.1 ± 3.0')
    >>> format_number(-0.2, 0.3), format_number(-0.001, 0.3), format_number(None)
    ('−0.20 ± 0.30', '0.00 ± 0.30', '–')

    Args:
        value: The number; None or nan is shown as a dash.
        margin: Half the width of its confidence interval. None, nan or zero is not shown.

    Returns:
        The text, with a typographic minus sign and no sign on a zero.
    """
    if value is None or math.isnan(value):
        return "–"
    if not margin or math.isnan(margin):
        text = f"{value:.3g}"
    else:
        places = max(0, 1 - int(f"{margin:e}".split("e")[1]))
        if places > _MOST_PLACES:
            text = f"{value:.3g} ± {margin:.2g}"
        else:
            text = f"{value:z.{places}f} ± {margin:.{places}f}"
    return text.replace("-", "−")


def format_residual(layer: Mapping[str, Any]) -> str:
    """Format the residual of a layer, with its margin unless the norm drifts.

    The margin is what noise alone could explain. A drift counts in it, up to 0.95 of the residual,
    so that it would look like an error of the drift, which it is not.

    >>> format_residual({"residual": -29.0, "margin": 26.0, "state": "norm grows"})
    '−29'
    >>> format_residual({"residual": -2.0, "margin": 2.6, "state": "not known yet"})
    '−2.0 ± 2.6'

    Args:
        layer: Its part of a row.

    Returns:
        The text.
    """
    drifts = (layer.get("state") or "").startswith("norm")
    return format_number(layer.get("residual"), None if drifts else layer.get("margin"))


def format_estimate(estimate: Estimate) -> str:
    """Format an estimate as `format_number` does.

    >>> format_estimate(Estimate(0.2, 0.01))
    '0.200 ± 0.020'

    Args:
        estimate: The estimate; without an error only its value is shown.

    Returns:
        The text.
    """
    return format_number(estimate.value, estimate.margin)
