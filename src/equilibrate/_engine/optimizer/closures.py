"""Notice steps that are given a closure, whose gradients are only known after the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.optim import Optimizer

T = TypeVar("T")


def watch_closures(
    owner: T, optimizer: Optimizer, note: Callable[[T, bool], None]
) -> weakref.finalize[..., T]:
    """Call `note` before each step of the optimizer, as long as the owner lives.

    Args:
        owner: What `note` is called with. The hook holds a weak reference to it.
        optimizer: The optimizer.
        note: Called with the owner and whether the step is given a closure.

    Returns:
        A function that removes the hook.
    """
    reference = weakref.ref(owner)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (found := reference()) is not None:
            given = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
            note(found, given is not None)

    return weakref.finalize(owner, optimizer.register_step_pre_hook(hook).remove)
