"""What a scheduler did when it was asked, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equilibrate.readings import Reading


@dataclass(frozen=True, slots=True)
class Decision:
    """What the scheduler did at one call of `step()`, and why."""

    lowered: bool
    """Whether the learning rate was lowered."""
    reason: str
    """Why, in one sentence with numbers."""
    reading: Reading
    """The reading that was judged, with the learning rate that was in use; the last one that was
    judged if there were too few steps to judge another."""
    lrs: tuple[float, ...]
    """The learning rate of each parameter group from now on."""

    @property
    def lr(self) -> float:
        """The learning rate from now on; nan if parameter groups have different ones."""
        return self.lrs[0] if len(set(self.lrs)) == 1 else math.nan


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came of asking the rule once."""

    step: int
    """Optimizer steps seen when it was asked, `monitor.step`."""
    lowered: bool
    """Whether the learning rate was lowered."""
    reason: str
    """Why, in one sentence with numbers."""
    lrs: tuple[float, ...]
    """The learning rate of each parameter group from then on."""
