"""Hooks on an optimizer's step that hold no reference to what they serve."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

T = TypeVar("T")


def unwrap(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside one that a trainer has wrapped.

    Raises:
        TypeError: If there is none.
    """
    inner = optimizer
    while not hasattr(inner, "_optimizer_step_post_hooks"):
        inner = getattr(inner, "optimizer", None) or getattr(inner, "_optimizer", None)
        if inner is None:
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
    return inner


def attach(
    owner: T,
    optimizer: Optimizer,
    before: Callable[[T], None],
    after: Callable[[T], None],
) -> weakref.finalize[..., T]:
    """Call `before` and `after` around each step of the optimizer, as long as the owner lives.

    Args:
        owner: What the functions are called with. The hooks hold a weak reference to it: a monitor
            that nobody holds any more must not stay alive for as long as the optimizer does.
        optimizer: The optimizer.
        before: Called before a step.
        after: Called after a step, before any other hook of the optimizer: another one may clear
            gradients or edit parameters.

    Returns:
        A function that removes the hooks.
    """
    nests, reference = _may_call_its_parents_step(type(optimizer)), weakref.ref(owner)
    handles = [
        optimizer.register_step_pre_hook(_hook(reference, before, nests)),
        optimizer.register_step_post_hook(_hook(reference, after, nests)),
    ]
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", None)
    if hooks is not None and handles[1].id in hooks:
        hooks.move_to_end(handles[1].id, last=False)
    return weakref.finalize(owner, _remove, handles)


def is_idle(optimizer: Optimizer) -> bool:
    """Return whether a step cannot change anything: its learning rates and state are nothing.

    `torch.distributed.checkpoint` makes such steps to create the state that it saves or loads.
    """
    if optimizer.state:
        return False
    for group in optimizer.param_groups:
        lr = group.get("lr")
        # A tensor on a device cannot be compared without waiting for it.
        if (isinstance(lr, Tensor) and lr.device.type != "cpu") or lr != 0:
            return False
    return True


def _hook(
    reference: weakref.ref[T],
    method: Callable[[T], None],
    nests: bool,
) -> Callable[..., None]:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # before anything that a compiler cannot trace
            return
        owner = reference()
        if owner is None or (nests and _is_inside_another(optimizer, sys._getframe(1))):
            return
        method(owner)

    return hook


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _may_call_its_parents_step(kind: type[Optimizer]) -> bool:
    # Torch stores a wrapped copy of an inherited `step` in the class itself.
    steps = [vars(parent)["step"] for parent in kind.__mro__ if "step" in vars(parent)]
    return len({inspect.unwrap(step) for step in steps}) > 2  # its own and `Optimizer`'s


def _is_inside_another(optimizer: Optimizer, caller: Any) -> bool:
    """Return whether a hook runs around the `step` of a parent class, called by its subclass.

    Torch wraps the `step` of each class of which there has been an instance, and each wrapper calls
    the hooks. Only the wrapper knows which `step` it wraps; counting calls would stay wrong for
    ever after a step has raised an error.
    """
    own = getattr(type(optimizer).step, "__wrapped__", None)
    return caller.f_locals.get("func", own) is not own
