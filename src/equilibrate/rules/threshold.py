"""The paper's rule: both sides of FDR1 agree to within a threshold."""

from __future__ import annotations

from dataclasses import dataclass

from equilibrate.outlook import further_steps, in_words
from equilibrate.readings import Reading, check_threshold
from equilibrate.rules.base import Verdict


@dataclass(frozen=True, slots=True)
class Threshold:
    """The paper's rule, section 3.3: equilibrated if |L̄/R̄ − 1| is below a threshold.

    The standard error of a reading does not enter the decision, as in the paper. If it is above the
    threshold the reason says so, and after how many steps it will not be any more. A weight
    norm that turns around crosses the threshold once on the way.

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
        >>> noisy = Reading(600, 300, left=1.04, right=1.0, lr=0.1, stderr=0.03, margin=0.06)
        >>> print(rule.judge(noisy).reason)
        not yet: |L/R − 1| = 0.04 ≥ 0.01, but the standard error, 0.03, is above 0.01 too, for \
about 1,200 more steps
    """

    threshold: float = 0.01

    def __post_init__(self) -> None:
        """Check the threshold."""
        check_threshold(self.threshold)

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
            reason = f"equilibrated: |L/R − 1| = {size:.3g} < {self.threshold:g}"
        else:
            reason = f"not yet: |L/R − 1| = {size:.3g} ≥ {self.threshold:g}"
        return Verdict(size < self.threshold, reason + self._noise(reading))

    def _noise(self, reading: Reading) -> str:
        """Return a remark on the standard error if it is above the threshold.

        A drift beyond its 95 % interval is not noise.
        """
        drifts = abs(reading.residual) > max(reading.margin, self.threshold)
        if drifts or not reading.stderr > self.threshold:
            return ""
        if abs(reading.residual) < self.threshold:
            return f" (standard error {reading.stderr:.2g})"
        more = in_words(further_steps(reading, self.threshold))
        remark = f", but the standard error, {reading.stderr:.2g}, is above {self.threshold:g} too"
        return f"{remark}, for about {more} more steps"
