"""The paper's rule: both sides of FDR1 agree to within a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equilibrate.readings import Reading
from equilibrate.rules.base import Verdict


@dataclass(frozen=True, slots=True)
class Threshold:
    """The paper's rule, section 3.3: equilibrated if |L̄/R̄ − 1| is below a threshold.

    It has no error bar: a reading that is noisier than the threshold may take long to fall below
    it, and a weight norm that turns around crosses it once on the way.

    Args:
        threshold: The paper's X.

    Raises:
        ValueError: If the threshold is not a positive finite number.

    Example:
        >>> rule = Threshold(0.01)
        >>> rule.judge(Reading(step=600, count=300, left=0.995, right=1.0, lr=0.1))
        Verdict(act=True, reason='equilibrated: |L/R − 1| = 0.005 < 0.01')
        >>> rule.judge(Reading(step=600, count=300, left=0.0, right=0.0, lr=0.1)).act
        False
    """

    threshold: float = 0.01

    def __post_init__(self) -> None:
        """Check the threshold.

        Raises:
            ValueError: If it is not a positive finite number.
        """
        if not (self.threshold > 0 and math.isfinite(self.threshold)):
            raise ValueError(
                f"threshold must be a positive number such as 0.01, got {self.threshold}"
            )

    def judge(self, reading: Reading) -> Verdict:
        """Return whether the reading is below the threshold.

        Args:
            reading: What a monitor or a relation has read.

        Returns:
            The verdict. An undefined reading is never equilibrated.
        """
        if reading.undefined is not None:
            return Verdict(False, f"undefined: {reading.undefined}")
        size = abs(reading.residual)
        if size < self.threshold:
            return Verdict(True, f"equilibrated: |L/R − 1| = {size:.3g} < {self.threshold:g}")
        return Verdict(False, f"not yet: |L/R − 1| = {size:.3g} ≥ {self.threshold:g}")
