"""What a scheduler did when it was asked, and why."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

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

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, strings and lists; not what the rule was given besides the reading."""
        reading = replace(self.reading, trace=None, forecasts=None, losses=None)
        return asdict(replace(self, reading=reading)) | {"lrs": list(self.lrs)}

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any]) -> Decision:
        """Return the decision that a state was made of.

        Args:
            state_dict: What `state_dict` returned.

        Returns:
            The decision.
        """
        reading = Reading(**state_dict["reading"])
        return cls(**state_dict | {"reading": reading, "lrs": tuple(state_dict["lrs"])})


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
