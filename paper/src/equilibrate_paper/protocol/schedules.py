"""Learning-rate schedules of the paper as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class PiecewiseConstant:
    """Constant learning rates one after another, each for a number of epochs.

    >>> PiecewiseConstant(((0.1, 2), (0.01, 3))).lr_at(2)
    0.01

    Raises:
        ValueError: If `phases` is empty, or a phase has no positive learning rate and length.
    """

    phases: tuple[tuple[float, int], ...]
    """(learning rate, epochs) of each phase."""

    def __post_init__(self) -> None:
        for lr, epochs in self.phases:
            if not lr > 0 or epochs < 1:
                raise ValueError(
                    f"phases must be (learning rate > 0, epochs ≥ 1), got ({lr}, {epochs})"
                )
        if not self.phases:
            raise ValueError("phases is empty: give at least one (learning rate, epochs)")

    @property
    def epochs(self) -> int:
        """Total number of epochs."""
        return sum(epochs for _, epochs in self.phases)

    @property
    def milestones(self) -> tuple[int, ...]:
        """Epochs after which the learning rate changes."""
        return tuple(accumulate(epochs for _, epochs in self.phases[:-1]))

    def lr_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch.

        Args:
            epoch: Number of epochs completed before it.
        """
        return self.phases[sum(epoch >= milestone for milestone in self.milestones)][0]

    def scaled(self, scale: float) -> PiecewiseConstant:
        """Return the same learning rates with each phase scaled to at least one epoch.

        Args:
            scale: Factor of the number of epochs.
        """
        return PiecewiseConstant(
            tuple((lr, max(1, round(epochs * scale))) for lr, epochs in self.phases)
        )


@dataclass(frozen=True)
class Adaptive:
    """The adaptive schedule of section 3.3.

    If |L̄/R̄ − 1| < `threshold` at the end of an epoch, the learning rate is multiplied by `factor`
    and the averages restart.
    """

    lr: float
    """Initial learning rate."""
    epochs: int
    """Total number of epochs."""
    threshold: float
    """The paper's X."""
    factor: float
    """One minus the paper's Y."""

    @property
    def decrease(self) -> float:
        """The paper's Y = 1 − `factor`.

        >>> Adaptive(lr=0.1, epochs=400, threshold=0.01, factor=0.9).decrease
        0.1
        """
        return round(1 - self.factor, 12)  # without the rounding error of the subtraction

    def scaled(self, scale: float) -> Adaptive:
        """Return the same rule for another number of epochs, at least one.

        Args:
            scale: Factor of the number of epochs.
        """
        return replace(self, epochs=max(1, round(self.epochs * scale)))


Schedule = PiecewiseConstant | Adaptive


def from_config(fields: Mapping[str, Any]) -> Schedule:
    """Return the schedule stored in the header of a record.

    Args:
        fields: The fields of the schedule, possibly read from JSON.
    """
    if "phases" in fields:
        return PiecewiseConstant(tuple((lr, epochs) for lr, epochs in fields["phases"]))
    return Adaptive(**fields)
