"""Since when the learning rates have been what they are now."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from equilibrate._engine.optimizer.rates import identity
from equilibrate._engine.optimizer.updates import learning_rate

_TOLERANCE = 0.2
"""By which share learning rates may differ and still count as the same."""


class Rates:
    """The learning rates of an optimizer at the steps where they changed.

    Args:
        span: Number of steps after which a change need not be remembered.
    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._changes: deque[tuple[int, list[float | Tensor]]] = deque()
        self._key: Any = None

    def note(self, optimizer: Optimizer, step: int) -> None:
        """Remember the learning rates, if they have changed. Nothing waits for a device.

        Args:
            optimizer: The optimizer.
            step: Number of the step that they are used in.
        """
        key = [identity(group.get("lr")) for group in optimizer.param_groups]
        if key == self._key:
            return
        self._key = key
        self._changes.append((step, [learning_rate(group) for group in optimizer.param_groups]))
        while len(self._changes) > 1 and self._changes[1][0] <= step - self._span:
            self._changes.popleft()

    def constant_since(self) -> int:
        """Return the step since which no learning rate has differed by 20 % from what it is now."""
        if not self._changes:
            return 0
        table = [(step, [float(lr) for lr in lrs]) for step, lrs in self._changes]
        since, now = table[-1]
        for step, lrs in reversed(table):
            if len(lrs) != len(now) or not all(map(_is_close, lrs, now)):
                break
            since = step
        return since

    def state_dict(self) -> list[list[float]]:
        """Return the changes as rows of a step and the learning rates then."""
        return [[float(step), *map(float, lrs)] for step, lrs in self._changes]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Restore what `state_dict` returned."""
        self._changes = deque((int(step), list(lrs)) for step, *lrs in state)
        self._key = None  # compared at the next step, for which the optimizer is restored


def _is_close(lr: float, now: float) -> bool:
    return abs(lr - now) <= _TOLERANCE * abs(now)
