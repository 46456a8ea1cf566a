"""What a relation says at one moment: both sides, averaged over a window of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from equilibrate.stationarity import Trace


@dataclass(frozen=True, slots=True, repr=False)
class Reading:
    """Both sides of a relation, averaged over a window of steps.

    Example:
        >>> Reading(step=10, count=5, left=1.02, right=1.0, lr=0.1)
        Reading(step=10, count=5, left=1.02, right=1, lr=0.1, residual=0.02)
    """

    step: int
    """Number of steps so far."""
    count: int
    """Number of steps in the averaging window."""
    left: float
    """Mean of the left side."""
    right: float
    """Mean of the right side."""
    lr: float
    """Learning rate of the last measured step; nan if parameter groups have different ones."""
    trace: Trace | None = field(default=None, repr=False, compare=False)
    """Positions of the parameters since the last reset, if the monitor records them. It is not
    saved with a scheduler."""

    @property
    def residual(self) -> float:
        """left/right − 1; nan if it is undefined (see `undefined`)."""
        return self.left / self.right - 1 if self.undefined is None else math.nan

    @property
    def difference(self) -> float:
        """The difference left − right, for relations whose right side is zero, such as ⟨∇f⟩ = 0."""
        return self.left - self.right

    @property
    def excess_loss(self) -> float:
        """⟨f − f₀⟩ ≈ right/2, the decrease of the loss if the learning rate went to zero.

        On a quadratic ⟨θ·∇f⟩ = 2⟨f − f₀⟩. By FDR1 the mean loss above the minimum is then
        (η/4)⟨Tr C̃⟩, and by FDR1′ (1+μ)/(4(1−ν)) η⟨v²⟩. This requires a reading of FDR1 (not of the
        step form of another optimizer) for the whole model, a stationary state, and a loss that is
        quadratic over the range of the fluctuations. f includes the L2 term.
        """
        return self.right / 2

    @property
    def undefined(self) -> str | None:
        """The reason why the residual is undefined, or None if it is defined."""
        if self.count == 0:
            return "no step has been seen yet"
        if not (math.isfinite(self.left) and math.isfinite(self.right)):
            return f"non-finite averages (left {self.left:g}, right {self.right:g})"
        if self.right == 0 and self.left == 0:
            return "both sides are zero: there are no fluctuations"
        if self.right == 0:
            return f"the right side is zero (left {self.left:g}): use the difference instead"
        return None

    def __repr__(self) -> str:
        return (
            f"Reading(step={self.step}, count={self.count}, left={self.left:.6g}, "
            f"right={self.right:.6g}, lr={self.lr:.6g}, residual={self.residual:.4g})"
        )
