"""Counts the steps of an optimizer, in one place for all that watch it."""

from __future__ import annotations


class Clock:
    """Steps of an optimizer so far.

    Most steps are only counted. A probe compares the count with the one at which its interval
    began, so nothing else has to be done at such a step.
    """

    __slots__ = ("calls", "steps")

    def __init__(self) -> None:
        self.steps = 0
        """Steps that may have moved the parameters."""
        self.calls = 0
        """Calls of `optimizer.step()`, including those that cannot change anything."""

    def tick(self) -> None:
        """Count one step."""
        self.steps += 1
        self.calls += 1

    def set(self, steps: int) -> None:
        """Continue from a number of steps, for example that of a loaded state."""
        self.calls += steps - self.steps
        self.steps = steps
