"""Measurements of a relation over a whole run: both sides and their difference with error bars."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from equilibrate import estimates
from equilibrate.estimates import Estimate


@dataclass(frozen=True, slots=True)
class Measurement:
    """Both sides of a relation and their difference, each with an error bar."""

    left: Estimate
    """Mean of the left side."""
    right: Estimate
    """Mean of the right side."""
    difference: Estimate
    """Mean of left − right. Its error is not that of two independent means."""

    @property
    def residual(self) -> float:
        """left/right − 1; nan if the right side is zero."""
        return self.left.value / self.right.value - 1 if self.right.value else math.nan

    @property
    def holds(self) -> bool:
        """Whether the difference is zero within its 95 % confidence interval."""
        return self.difference.covers(0.0)


def measure_series(left: Tensor, right: Tensor, potential: Tensor | None = None) -> Measurement:
    """Average recorded series of both sides, as `Relation.measure` does.

    Args:
        left: Left side, of shape (steps,) or (steps, replicas).
        right: Right side, of the same shape.
        potential: Potential Φ before each step, of the same shape, for a relation that has one.

    Returns:
        Left side, right side and their difference.

    Example:
        >>> import torch
        >>> phi = torch.randn(1001, generator=torch.Generator().manual_seed(0)).double()
        >>> measure_series(1 + phi[:-1] - phi[1:], torch.ones(1000), phi[:-1]).left.stderr < 0.002
        True
    """
    mean = estimates.mean(right)
    if potential is None or right[0].numel() > 1 or len(right) < 2:
        return Measurement(estimates.mean(left), mean, estimates.mean(left - right))
    drift = estimates.telescoping_mean((left - right).sum().item(), potential.reshape(-1))
    stderr = math.hypot(mean.stderr, drift.stderr)
    left_mean = Estimate(
        mean.value + drift.value,
        stderr,
        # Welch–Satterthwaite, with infinitely many degrees of freedom for the drift.
        dof=mean.dof * (stderr / mean.stderr) ** 4 if mean.stderr > 0 else math.inf,
        count=mean.count,
        method=f"{mean.method} of the right side, and the {drift.method}",
    )
    return Measurement(left_mean, mean, drift)
