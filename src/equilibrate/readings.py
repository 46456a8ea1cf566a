"""What a relation says at one moment: both sides, averaged over a window of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from equilibrate._arguments import lies_between
from equilibrate.estimates import Estimate


@dataclass(frozen=True, slots=True, repr=False)
class Reading:
    """Both sides of a relation, averaged over a window of steps.

    Error bars say how far from zero the residual would be by chance in the stationary state. A
    drift is not chance, but widens them as well (`telescoped.spread`), up to 0.95 of the residual.
    They need at least eight measured steps in the window, and are nan without. Readings with equal
    averages are equal.

    Example:
        >>> Reading(step=10, count=5, left=1.02, right=1.0, lr=0.1)
        Reading(step=10, count=5, left=1.02, right=1, lr=0.1, residual=0.02)
        >>> reading = Reading(400, 200, left=1.02, right=1.0, lr=0.1, stderr=0.04, margin=0.07)
        >>> reading
        Reading(step=400, count=200, left=1.02, right=1, lr=0.1, residual=0.020 ± 0.070)
        >>> reading.further_steps(0.01)
        1200
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
    stderr: float = field(default=math.nan, compare=False)
    """Standard error of `residual`; nan if it is not known."""
    margin: float = field(default=math.nan, compare=False)
    """Half the width of the 95 % confidence interval of `residual`; nan if it is not known."""

    @property
    def residual(self) -> float:
        """left/right − 1; nan if it is undefined (see `undefined`)."""
        return self.left / self.right - 1 if self.undefined is None else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end of the 95 % confidence interval of `residual`.

        It contains zero in 95 % of all windows of the stationary state, whatever the loss, the
        noise and the optimizer are, if the slowest mode relaxes in up to a tenth of the window. If
        it takes longer the interval is too narrow: it contains zero in about 93 % of all windows at
        half a window, and in 89 % at many windows.
        """
        return self.residual - self.margin, self.residual + self.margin

    def further_steps(self, threshold: float) -> float:
        """Return how many steps later `stderr` will have fallen to a threshold.

        The error falls as 1/n with the number n of steps in the window, once that exceeds the
        relaxation time, and the window, the later half of the steps, grows by one step in two. A
        drift makes the answer larger than it would be without.

        Args:
            threshold: A bound on |residual|.

        Returns:
            A whole number of steps, zero if the error is below; nan if it is not known.
        """
        needed = self.count * self.stderr / threshold
        return 2 * max(0, math.ceil(needed) - self.count) if math.isfinite(needed) else needed

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
        residual = f"{self.residual:.4g}"
        if math.isfinite(self.margin):
            residual = str(Estimate(self.residual, self.stderr, margin=self.margin))
        return (
            f"Reading(step={self.step}, count={self.count}, left={self.left:.6g}, "
            f"right={self.right:.6g}, lr={self.lr:.6g}, residual={residual})"
        )


def check_threshold(threshold: float) -> None:
    """Check a threshold for |residual|.

    Args:
        threshold: The number to check.

    Raises:
        ValueError: If it is not a positive finite number.
    """
    if not lies_between(threshold, 0, math.inf):
        raise ValueError(f"threshold must be a positive number such as 0.01, got {threshold!r}")


def in_words(steps: float) -> str:
    """Return a number of steps to two digits, for people to read.

    Args:
        steps: A number of steps.

    Example:
        >>> in_words(8957), in_words(1_234_567), in_words(42)
        ('9,000', '1,200,000', '42')
    """
    digits = max(0, math.floor(math.log10(max(steps, 1))) - 1)
    return f"{round(steps, -digits):,.0f}"
