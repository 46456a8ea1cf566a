"""Learning rates that fall linearly to zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SHORTEST = 0.1
"""Share of the steps that a cooldown has at least, whatever a rule says."""

_EXTRA = 10
"""Calls after the end without a warning: a trainer may step once more than it trains."""


class Line:
    """A linear cooldown that ends at a given step.

    Args:
        end: The step at which learning rates are zero.
    """

    def __init__(self, end: int) -> None:
        self.end = end
        self._start = -1
        self._lrs: tuple[float, ...] = ()
        self._extra = 0

    @property
    def begun(self) -> bool:
        """Whether the cooldown has begun."""
        return self._start >= 0

    def is_due(self, step: int) -> bool:
        """Return whether it has to begin at a step, even if no rule says so."""
        return self.end - max(1, SHORTEST * self.end) <= step < self.end

    def begin(self, step: int, lrs: Sequence[float]) -> None:
        """Begin the cooldown at a step before its end, with the learning rates of the groups."""
        self._start, self._lrs = step, tuple(lrs)

    def share(self, step: int) -> float:
        """Return which share of the learning rates is left at a step."""
        return max(0.0, (self.end - step) / (self.end - self._start))

    def count_overrun(self, step: int) -> bool:
        """Count a call after the end.

        Calls are counted, because steps are not where the learning rate is zero.

        Args:
            step: The step.

        Returns:
            Whether it is the tenth one, of which to warn.
        """
        self._extra += step >= self.end
        return self._extra == _EXTRA and step >= self.end

    def lrs(self, step: int, current: Sequence[float], lowest: Sequence[float]) -> list[float]:
        """Return the learning rate of each group at a step. None of them is raised.

        Args:
            step: The step.
            current: The present learning rates; groups that were added since keep theirs.
            lowest: The lower bound on the learning rate of each group.
        """
        cooled = [self.share(step) * lr for lr in self._lrs]
        cooled += current[len(cooled) :]
        rates = zip(current, cooled, lowest, strict=True)
        return [min(lr, max(lower, low)) for lr, lower, low in rates]

    def state_dict(self, groups: int) -> dict[str, Any]:
        """Return the state, which has the same shape at any time."""
        lrs = [*self._lrs, *[0.0] * groups][: max(groups, len(self._lrs))]
        return {"end": self.end, "start": self._start, "count": len(self._lrs), "lrs": lrs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.end, self._start = state["end"], state["start"]
        self._lrs = tuple(state["lrs"][: state["count"]])
