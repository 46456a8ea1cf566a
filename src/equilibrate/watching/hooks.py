"""Hooks on an optimizer's step that hold no reference to what they serve."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

_attached: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[StepHooks]] = (
    weakref.WeakKeyDictionary()
)
"""The hooks on each optimizer, for `measure`."""


class StepListener(Protocol):
    """What `StepHooks` calls around each step."""

    def before_step(self, *, deferred: bool) -> None:
        """Prepare for a step. If `deferred`, its gradients are only known after it."""

    def after_step(self) -> None:
        """Note a step that was made."""


class StepHooks:
    """Calls a listener around each step of an optimizer, as long as the listener lives.

    The listener is held by a weak reference: a monitor that nobody holds any more must not stay
    alive for as long as the optimizer does. Hooks do nothing while torch compiles a step or
    captures it into a CUDA graph, and inside `measure`, which calls the listener itself.

    Torch wraps the `step` of each class of which there was an instance, and each wrapper calls all
    hooks.
    If the `step` of a class calls that of its parent, only the outer call counts. A step that has
    raised an error leaves a call open; as many as there are wrappers cannot be open at once, nor
    can one begin after an inner one has ended, so the next step is then the outer one again.

    Args:
        listener: What to call.
        optimizer: The optimizer.
    """

    def __init__(self, listener: StepListener, optimizer: Optimizer) -> None:
        self._listener = weakref.ref(listener)
        self._open = 0
        self._closing = False
        self._explicit = False
        self._ignored = False
        handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        # Before any other hook, which may clear gradients or edit parameters.
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handles[1].id, last=False)
        self.remove = weakref.finalize(listener, _remove, handles)
        """Removes the hooks."""
        _attached.setdefault(optimizer, weakref.WeakSet()).add(self)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # before anything that a compiler cannot trace
            return
        if self._open and (self._closing or self._open >= _wrapped_steps(type(optimizer))):
            self._open = 0
        self._open += 1
        if self._open > 1:
            return
        self._ignored = self._explicit or _is_capturing()
        if not self._ignored and (listener := self._listener()) is not None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is `self`
            listener.before_step(deferred=closure is not None)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._open:
            return
        self._open -= 1
        self._closing = self._open > 0
        if not (self._closing or self._ignored) and (listener := self._listener()) is not None:
            listener.after_step()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Call the listener around a block, and not from hooks inside it.

        Yields:
            None.
        """
        listener = self._listener()
        if listener is None or not self.remove.alive:
            yield
            return
        self._explicit = True
        try:
            listener.before_step(deferred=True)
            yield
            listener.after_step()
        finally:
            self._explicit = False


@contextmanager
def measure(optimizer: Optimizer) -> Iterator[None]:
    """Show one step that hooks cannot see to everything that watches an optimizer.

    Hooks do not run when a CUDA graph is replayed and do nothing inside a compiled
    `optimizer.step`. Put exactly one step into the block, and whatever computes its gradient if
    that is captured with it. Monitors, forecasters and schedulers on the optimizer all see it.

    Args:
        optimizer: The optimizer that was given to them.

    Yields:
        None.

    Example:
        >>> import equilibrate as eq
        >>> theta = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> monitor = eq.Monitor(optimizer)
        >>> theta.grad = torch.tensor([1.0, 0.0])
        >>> with eq.measure(optimizer):  # instead of optimizer.step(): a compiled step, a replay
        ...     _ = theta.data.sub_(0.5 * theta.grad)
        >>> monitor.reading().right
        0.25
    """
    with ExitStack() as stack:
        for hooks in list(_attached.get(unwrap(optimizer), ())):
            stack.enter_context(hooks.measure())
        yield


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


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _wrapped_steps(kind: type[Optimizer]) -> int:
    """Return how many different `step` functions of a class and its parents call hooks."""
    steps = [vars(parent)["step"] for parent in kind.__mro__ if "step" in vars(parent)]
    # Torch stores a wrapped copy of an inherited `step` in the class itself.
    return len({inspect.unwrap(step) for step in steps if getattr(step, "hooked", False)})
