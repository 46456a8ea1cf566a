"""What a scheduler decided, and why."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from equilibrate.readings import Reading


@dataclass(frozen=True, slots=True)
class Decision:
    """What a scheduler decided at one time, and why."""

    step: int
    """Optimizer steps so far, as the scheduler counts them."""
    lowered: bool
    """Whether the learning rate was lowered, or begins to decay here."""
    reason: str
    """Why, in one sentence with numbers."""
    lrs: tuple[float, ...]
    """The learning rate of each parameter group from then on."""
    reading: Reading | None = None
    """The reading that was judged, with the learning rate that was in use; None without one."""

    @property
    def lr(self) -> float:
        """The learning rate from then on; nan if parameter groups have different ones."""
        return self.lrs[0] if len(set(self.lrs)) == 1 else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, strings and lists."""
        return asdict(self) | {"lrs": list(self.lrs)}

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any]) -> Decision:
        """Return the decision that a state was made of.

        Args:
            state_dict: What `state_dict` returned.

        Returns:
            The decision.
        """
        reading = state_dict["reading"]
        found = {"reading": reading and Reading(**reading), "lrs": tuple(state_dict["lrs"])}
        return cls(**state_dict | found)
