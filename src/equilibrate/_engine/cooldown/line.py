"""Learning rates that fall linearly, and warnings of calls that cannot follow them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

SHORTEST = 0.1
"""Share of the steps that a cooldown has at least, whatever a rule says."""

_RARE = 0.02
"""Share of the steps between two calls from which on a cooldown is a staircase of few steps."""

_EXTRA = 10
"""Calls after the end without a warning: a trainer may step once more than it trains."""


class Line:
    """A linear cooldown that ends at a given step.

    Args:
        end: The step at which learning rates are zero, or at their lower bounds.
    """

    def __init__(self, end: int) -> None:
        self.end = end
        self._start = -1
        self._lrs: tuple[float, ...] = ()
        self._extra = 0
        self._has_warned = False

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

    def lrs(self, step: int, current: Sequence[float], lowest: Sequence[float]) -> list[float]:
        """Return the learning rate of each group at a step. None of them is raised.

        Args:
            step: The step.
            current: The present learning rates; groups that were added since keep theirs.
            lowest: The lower bound on the learning rate of each group, reached at the end.
        """
        share = max(0.0, (self.end - step) / (self.end - self._start))
        bounds = zip(self._lrs, lowest, strict=False)
        cooled = [share * lr + (1 - share) * min(low, lr) for lr, low in bounds]
        cooled += current[len(cooled) :]
        return [min(lr, new) for lr, new in zip(current, cooled, strict=True)]

    def reason(self, step: int, lrs: Sequence[float]) -> str:
        """Return where the cooldown is at a step, with the learning rates that it has then."""
        if step >= self.end:
            return f"the cooldown has ended at step {self.end}"
        left = max(
            (lr / first for lr, first in zip(lrs, self._lrs, strict=False) if first), default=0.0
        )
        return f"cooling down until step {self.end}: {left:.1%} of the learning rate is left"

    def warn_if_passed(self, before: int, step: int) -> None:
        """Warn if a training has passed the end without a cooldown since the call before."""
        if before < self.end <= step:
            warnings.warn(
                f"the step of cooldown_end={self.end} has passed without a cooldown. It begins "
                f"when step() is called, which was {step - before} optimizer steps ago, and "
                "cooldown_end counts optimizer steps, not epochs: call scheduler.step(loss) after "
                "every optimizer step, and pass the number of steps of the training",
                stacklevel=4,
            )

    def warn_if_rare(self, before: int, step: int) -> None:
        """Warn once if there are too many steps since the call before to follow a cooldown."""
        if step - before > max(1, _RARE * self.end) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"step() was called after {step - before} optimizer steps, and the cooldown to "
                f"cooldown_end={self.end} lowers the learning rate only when it is called: call "
                "scheduler.step(loss) after every optimizer step",
                stacklevel=4,
            )

    def warn_if_overrun(self, step: int, lrs: Sequence[float]) -> None:
        """Warn once if a training continues at a learning rate of zero.

        Calls are counted, because steps are not where the learning rate is zero.
        """
        self._extra += step >= self.end and not any(lrs)
        if self._extra == _EXTRA:
            self._extra += 1
            warnings.warn(
                f"the training continues after cooldown_end={self.end}, where the learning rate is "
                "0. It counts optimizer steps, not epochs: pass the number of steps of the "
                "training, or a min_lr",
                stacklevel=5,
            )

    def state_dict(self, groups: int) -> dict[str, Any]:
        """Return the state, which has the same shape at any time."""
        lrs = [*self._lrs, *[0.0] * groups][: max(groups, len(self._lrs))]
        return {"end": self.end, "start": self._start, "count": len(self._lrs), "lrs": lrs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.end, self._start = state["end"], state["start"]
        self._lrs = tuple(state["lrs"][: state["count"]])
