"""When to lower the learning rate: pure rules from a reading to a verdict with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from equilibrate.outlook import further_steps, in_words
from equilibrate.readings import Reading, check_threshold


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a rule says that it is time to act, and why."""

    act: bool
    reason: str


@runtime_checkable
class Rule(Protocol):
    """What `FDRScheduler` asks of a rule.

    A rule is a frozen dataclass with one method. Its fields are its settings, which are saved and
    restored with the scheduler.

    Example:
        >>> @dataclass(frozen=True)
        ... class After:
        ...     steps: int = 1000
        ...
        ...     def judge(self, reading: Reading) -> Verdict:
        ...         return Verdict(reading.count >= self.steps, f"{reading.count} steps")
    """

    def judge(self, reading: Reading) -> Verdict:
        """Return whether to act on a reading, and why."""
        ...


@dataclass(frozen=True, slots=True)
class Threshold:
    """The paper's rule, section 3.3: equilibrated if |L̄/R̄ − 1| is below a threshold.

    The error bar of a reading does not enter the decision, as in the paper. If it is larger than
    the threshold the reason says so, and after how many steps it will not be any more. A weight
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
        not yet: |L/R − 1| = 0.04 ≥ 0.01, but the error bar, ±0.03, is larger: about 1,200 more \
steps are needed
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
        """Return a remark on the error bar if it is larger than the threshold.

        A drift beyond its error bar is no noise.
        """
        drifts = abs(reading.residual) > max(reading.margin, self.threshold)
        if drifts or not reading.stderr > self.threshold:
            return ""
        if abs(reading.residual) < self.threshold:
            return f" (error bar ±{reading.stderr:.2g})"
        more = in_words(further_steps(reading, self.threshold))
        remark = f", but the error bar, ±{reading.stderr:.2g}, is larger"
        return f"{remark}: about {more} more steps are needed"


def check_factor(factor: float) -> None:
    """Check a factor by which a learning rate is lowered.

    Args:
        factor: What the learning rate is multiplied by.

    Raises:
        ValueError: If it does not lie between 0 and 1.
    """
    if not 0 < factor < 1:
        raise ValueError(f"factor must lie between 0 and 1, such as 0.9, got {factor}")
