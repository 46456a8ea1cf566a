"""The results of a sweep: one point for each learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate_paper.ensemble import Sampling


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The measurement at one learning rate, with one value for each seed."""

    lr: float
    """Learning rate η."""
    fdr2_left: tuple[float, ...]
    """(1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩, the paper's O_FB, which is G(η) without momentum."""
    noise_trace: tuple[float, ...]
    """⟨Tr C̃⟩."""
    residual: float
    """L̄/R̄ − 1 of FDR1 over the measured epochs, for all seeds together."""
    epochs_waited: int
    """Number of epochs before the measurement."""
    epochs_measured: int
    """Number of epochs of the measurement, each with a full-batch gradient at its end."""
    equilibrated: bool
    """Whether FDR1 held in two successive windows: before the measurement, or, if the number of
    epochs was fixed, in the two halves of the measurement."""

    @property
    def estimate(self) -> Estimate:
        """The mean of `fdr2_left` over the seeds, with an error bar from their spread."""
        return estimates.mean(torch.tensor([self.fdr2_left]))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Measurements at several learning rates, in increasing order, and their settings."""

    points: tuple[SweepPoint, ...]
    """One point for each learning rate."""
    momentum: float
    """Momentum μ."""
    dampening: float
    """Dampening ν."""
    sampling: Sampling
    """How mini-batches were drawn."""
    steps_per_epoch: int
    """M, the number of mini-batches in an epoch."""
    threshold: float
    """Largest |L̄/R̄ − 1| at which FDR1 counts as satisfied."""


def point_from_dict(fields: dict[str, Any]) -> SweepPoint:
    """Restore a point from `dataclasses.asdict`, also after it was written to JSON.

    Args:
        fields: The fields of the point; None is a number that was not finite.

    Returns:
        The point.

    Example:
        >>> from dataclasses import asdict
        >>> point = SweepPoint(0.1, (1.0, 2.0), (3.0, 4.0), math.nan, 9, 9, True)
        >>> point_from_dict({**asdict(point), "residual": None}).fdr2_left
        (1.0, 2.0)
    """

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    values = {**fields, "residual": number(fields["residual"])}
    for name in ("fdr2_left", "noise_trace"):
        values[name] = tuple(map(number, fields[name]))
    return SweepPoint(**values)
