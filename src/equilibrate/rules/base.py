"""What a rule is: a reading goes in, a verdict with its reason comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from equilibrate.readings import Reading


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


def check_factor(factor: float) -> None:
    """Check a factor by which a learning rate is lowered.

    Args:
        factor: What the learning rate is multiplied by.

    Raises:
        ValueError: If it does not lie between 0 and 1.
    """
    if not 0 < factor < 1:
        raise ValueError(f"factor must lie between 0 and 1, such as 0.9, got {factor}")
