"""What lowering the learning rate would gain, with an error bar."""

from __future__ import annotations

from dataclasses import dataclass

from equilibrate.estimates import Estimate


@dataclass(frozen=True, slots=True)
class Forecast:
    """What lowering the learning rate to zero over a number of steps would gain.

    The gain is the excess loss due to the noise of the parameters that the cooldown removes. It is
    what the cooldown gains over staying at the present learning rate. Staying gains something too
    while the loss still falls; the two add up to the fall of the loss during the cooldown.
    """

    horizon: int
    """Length of the cooldown, in steps."""
    gain: Estimate
    """Decrease of the training loss compared to staying; nan if `undefined`. Its error is that of
    the average over the window."""
    step: int
    """Number of steps so far."""
    undefined: str | None = None
    """The reason why there is no forecast, or None if there is one."""

    def __str__(self) -> str:
        if self.undefined is not None:
            return f"no forecast for a cooldown over {self.horizon} steps: {self.undefined}"
        return f"a cooldown over {self.horizon} steps is worth {self.gain} of training loss"
