"""What a run would be worth after a cooldown, with error bars."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equilibrate.estimates import Estimate

_UNKNOWN = Estimate(math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Where the training loss would be after a cooldown, and after staying.

    A cooldown lowers the learning rate linearly to zero. Each number is nan if `undefined`.
    """

    horizon: int
    """Length of the cooldown, in steps."""
    step: int
    """Number of steps so far."""
    undefined: str | None = None
    """The reason why there is no forecast, or None if there is one."""
    now: Estimate = _UNKNOWN
    """The training loss at present."""
    after: Estimate = _UNKNOWN
    """The training loss after the cooldown."""
    staying: Estimate = _UNKNOWN
    """The training loss after as many steps at the present learning rate."""
    gain: Estimate = _UNKNOWN
    """`now` less `after`. Its error is smaller than those of the two losses."""
    over_staying: Estimate = _UNKNOWN
    """`staying` less `after`: what the cooldown gains over staying."""
    noise: Estimate = _UNKNOWN
    """Excess loss due to the noise of the learning rate, which the cooldown removes."""

    def __str__(self) -> str:
        if self.undefined is not None:
            return f"no forecast for a cooldown over {self.horizon:,} steps: {self.undefined}"
        return (
            f"a cooldown over {self.horizon:,} steps would end at {self.after}; "
            f"now {_short(self.now, self.after)}, staying {_short(self.staying, self.after)}"
        )


def _short(loss: Estimate, like: Estimate) -> str:
    """Return a loss with as many digits as another one is printed with."""
    number = str(like).split()[0]
    return f"{loss.value:.{len(number.partition('.')[2])}f}"
