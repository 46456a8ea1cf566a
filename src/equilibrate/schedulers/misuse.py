"""Notice loops in which a schedule has no effect, or another one than it seems to have."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from equilibrate.forecast.losses import are_mismatched
from equilibrate.watching.hooks import StepHooks

_UNCALLED = 200
"""Optimizer steps before the first call of the scheduler after which to warn."""
_UNSEEN = 64
"""Calls without a step after which to warn. Gradient scaling skips some sixteen at the start."""


def mismatch(calls: int, seen: int, total_steps: int) -> str | None:
    """Return what is wrong if a scheduler is not called once after each optimizer step.

    Args:
        calls: Number of calls.
        seen: Optimizer steps that hooks have seen meanwhile.
        total_steps: Length of the training.
    """
    if seen == 0 and calls >= _UNSEEN:
        return (
            "no optimizer step was seen in many calls of step(): step the optimizer that the "
            "scheduler was created with, and wrap compiled or captured steps in "
            "`with eq.measure(optimizer):`"
        )
    if seen and are_mismatched(calls, seen):
        return (
            f"step() is not called once after every optimizer step (at first {calls} times in "
            f"{seen} of them), and total_steps={total_steps} counts calls: call "
            "scheduler.step(loss) after every optimizer step"
        )
    return None


class FirstSteps:
    """Warns if an optimizer makes many steps, or had a state loaded, before the first call.

    It watches as long as it lives. A copy is None: it would have no optimizer to watch.

    Args:
        optimizer: The optimizer of the scheduler.
        total_steps: Length of the training.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int) -> None:
        self.has_warned = False
        """Whether it has warned of missing calls."""
        self._optimizer, self._total_steps = optimizer, total_steps
        self._is_new = not optimizer.state
        self._steps = 0
        StepHooks(self, optimizer)

    def before_step(self, *, deferred: bool) -> None:
        """Check before the first step whether a state was loaded; called by the hooks."""
        is_new, self._is_new = self._is_new, False
        if is_new and self._optimizer.state:
            warnings.warn(
                "a state was loaded into the optimizer, but none into the scheduler, which begins "
                f"at step 0 of total_steps={self._total_steps}: call scheduler.load_state_dict() "
                "too, or, if earlier steps are not to count, create the scheduler after loading",
                stacklevel=5,
            )

    def after_step(self) -> None:
        """Count a step; called by the hooks."""
        self._steps += 1
        if self._steps == _UNCALLED:
            self.has_warned = True
            warnings.warn(
                f"the optimizer has made {_UNCALLED} steps, but step() of the scheduler was not "
                "called, so the learning rate never decays: call scheduler.step(loss) after every "
                "optimizer step. A handler that only asks a scheduler for its rate, as ignite's "
                "LRScheduler does, does not call it",
                stacklevel=5,
            )

    def __reduce__(self) -> Any:
        return type(None), ()


class OwnRates:
    """Warns if an optimizer makes a step with other learning rates than the scheduler has set.

    It watches as long as it lives. A copy is None: it would have no optimizer to watch.

    Args:
        optimizer: The optimizer of the scheduler.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.lrs: list[Any] = []
        """What the scheduler has set. A tensor, which all change in place, is not compared."""
        self._optimizer = optimizer
        self._has_warned = False
        StepHooks(self, optimizer)

    def before_step(self, *, deferred: bool) -> None:
        """Compare the learning rates; called by the hooks."""
        used = [group["lr"] for group in self._optimizer.param_groups][: len(self.lrs)]
        if used != self.lrs and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the optimizer makes a step with lr={_words(used)}, but the decay of the "
                f"scheduler has set it to {_words(self.lrs)}: remove the other scheduler, or call "
                "its step() before that of this one",
                stacklevel=5,
            )

    def after_step(self) -> None:
        """Do nothing; called by the hooks."""

    def __reduce__(self) -> Any:
        return type(None), ()


def _words(lrs: Sequence[Any]) -> str:
    return ", ".join(f"{float(lr):g}" for lr in lrs)
