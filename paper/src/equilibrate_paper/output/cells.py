"""Headings and cells that several tables have in common."""

from __future__ import annotations

import numpy as np

from equilibrate.estimates import Estimate
from equilibrate.report.numbers import format_estimate
from equilibrate_paper.analysis.results import Array, Phase, Result
from equilibrate_paper.analysis.seeds import mean_over_seeds


def heading(text: str, *results: Result) -> str:
    """Append to a heading what is missing from its runs.

    Args:
        text: The heading.
        *results: The runs that the table is made from.

    Returns:
        The heading, with the epochs and seeds of incomplete runs.
    """
    missing = [f"{r.run.name}: {shortfall}" for r in results if (shortfall := r.shortfall)]
    return text + (f" (incomplete – {'; '.join(missing)})" if missing else "")


def over_seeds(values: Array) -> str:
    """Format the mean and 95 % interval over seeds.

    >>> over_seeds(np.array([1.0, 2.0, 3.0]))
    '2.0 ± 2.5'

    Args:
        values: A value for each seed.

    Returns:
        The text.
    """
    return format_estimate(mean_over_seeds(values))


def landscape(phase: Phase | None) -> Estimate:
    """Estimate O_FB at the end of a phase.

    Args:
        phase: The phase, if there is one.

    Returns:
        The estimate; nan without a phase.
    """
    return mean_over_seeds(np.array([]) if phase is None else phase.last("landscape"))
