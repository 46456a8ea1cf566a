"""What everything that watches the steps of an optimizer has in common."""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.optim import Optimizer

from equilibrate._arguments import check_steps
from equilibrate.watching.hooks import StepHooks, is_idle, unwrap
from equilibrate.watching.parameters import ParameterSet
from equilibrate.watching.rates import settings_getter

_NO_GRAD = torch.no_grad()


def measured_position(block: int, every: int) -> int:
    """Return which step of a block of `every` steps is measured, as if drawn at random.

    Measuring always the same one would meet data whose epochs are a multiple of `every` steps: it
    would see their last, smaller batch always or never. The position is a hash of the number of
    the block (the finaliser of SplitMix64), so it is the same on every process and after a resume.

    Args:
        block: Number of the block since the first step.
        every: Number of steps in a block.

    Returns:
        A number from 0 to `every` − 1.

    Example:
        >>> [measured_position(block, 16) for block in range(6)]
        [15, 4, 15, 12, 11, 10]
    """
    mask = (1 << 64) - 1
    x = (block + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) % every


class Watcher:
    """Counts the steps of an optimizer, and measures some of them.

    It measures the first step after a reset and then one in each block of `every` steps, at a
    random position. Between them it only compares the settings of the parameter groups with what
    they were. A subclass says what to do at a measured step, and when something has changed; its
    `_lay_out` and `reset` are called inside `__init__`.

    Args:
        optimizer: Any `torch.optim.Optimizer`, or one that accelerate has wrapped.
        every: Measure one in this many steps.
    """

    def __init__(self, optimizer: Optimizer, every: int) -> None:
        self._optimizer = unwrap(optimizer)
        self._every = check_steps("every", every)
        self._step = 0
        self._start = 0
        """Steps so far at the last reset."""
        self._next = 0
        """Number of the next step to measure, from 0."""
        self._measured = self._idle = self._calm = False
        self._lay_out()
        self._hooks = StepHooks(self, self._optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that is watched."""
        return self._optimizer

    @property
    def every(self) -> int:
        """One in this many steps is measured."""
        return self._every

    @property
    def step(self) -> int:
        """Optimizer steps seen, whether measured or not."""
        return self._step

    @property
    def since_reset(self) -> int:
        """Optimizer steps seen since the last `reset`."""
        return self._step - self._start

    @property
    def parameters(self) -> ParameterSet:
        """The parameters as they were last laid out."""
        return self._parameters

    @property
    def is_attached(self) -> bool:
        """Whether the hooks are in place."""
        return self._hooks.remove.alive

    def reset(self) -> None:
        """Forget everything measured so far. The step counter keeps running."""
        self._start = self._next = self._step
        self._calm = False

    def detach(self) -> None:
        """Remove the hooks. What was measured stays available."""
        self._hooks.remove()

    # Steps ------------------------------------------------------------------------------------

    def before_step(self, *, deferred: bool) -> None:
        """Prepare for a step; called by the hooks.

        Args:
            deferred: Whether the gradients are only known after the step.
        """
        self._measured = self._step >= self._next
        if self._measured or not self._calm or self._has_changed():
            self._prepare(deferred)

    def after_step(self) -> None:
        """Count a step, and measure it if it is due; called by the hooks."""
        if self._idle:
            self._idle = False
            return
        self._step += 1
        if self._measured or not self._calm or hasattr(self._optimizer, "found_inf"):
            with _NO_GRAD:
                self._finish_step()
        if self._measured:
            spacing = self._spacing()
            block = self._step // spacing
            position = block * spacing + measured_position(block, spacing)
            if position < self._step:  # of this block one has been measured, or is passed
                block += 1
                position = block * spacing + measured_position(block, spacing)
            self._next = position

    def _has_changed(self) -> bool:
        """Return whether a setting has changed, or a parameter was added: cheap, for each step."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._known):
            return True
        for group, (size, settings, key) in zip(groups, self._known, strict=True):
            if len(group["params"]) != size or settings(group) != key:
                return True
        return False

    def _prepare(self, deferred: bool) -> None:
        """Do what a step asks for that is measured, or before which something may have changed."""
        self._idle = is_idle(self._optimizer)
        if self._idle:
            return
        if not self._parameters.is_current():  # a kernel must never be given other tensors
            self._lay_out()
            self._measured = True
        with _NO_GRAD:
            if self._has_changed():
                self._calm = False  # this step is finished like one that is measured
                self._remember_settings()
                self._settings_changed()
            self._before(deferred)

    def _lay_out(self) -> None:
        """Sort the parameters into buckets, and begin again."""
        self._parameters = ParameterSet(self._optimizer)
        self._known: list[tuple[int, Callable[[Any], Hashable], Hashable]] = []
        self.reset()

    def follow_parameters(self, *, converted: bool = False) -> None:
        """Begin again if parameters were added or exchanged.

        Parameters that were only moved to another device or converted, as some trainers do at the
        end of a training, change nothing until the next step: what was measured can still be read.

        Args:
            converted: Whether to begin again, too, if they were converted to another dtype.
        """
        same = self._parameters.has_same_parameters()
        if not same or (converted and self._parameters.are_converted()):
            self._lay_out()

    def _remember_settings(self) -> None:
        self._known = []
        for group in self._optimizer.param_groups:
            getter = settings_getter(group, (name for name in self._settings() if name in group))
            self._known.append((len(group["params"]), getter, getter(group)))

    # For subclasses ---------------------------------------------------------------------------

    def _spacing(self) -> int:
        """Return the number of steps in the coming block, of which one is measured."""
        return self._every

    def _settings(self) -> tuple[str, ...]:
        """Return the settings of a parameter group whose changes matter."""
        return ("lr",)

    def _settings_changed(self) -> None:
        """Note that settings of the groups have changed before this step."""

    def _before(self, deferred: bool) -> None:
        """Prepare for a step that is measured, or before which something may have changed."""

    def _finish_step(self) -> None:
        """Finish a step that was prepared for, or that gradient scaling may have skipped."""

    # State ------------------------------------------------------------------------------------

    def _counters(self) -> dict[str, Any]:
        """Return the state that every watcher has."""
        return {
            "kind": type(self).__name__,
            "step": self._step,
            "start": self._start,
            "next": self._next,
            "every": self._every,
            "fingerprint": self._parameters.fingerprint(),
        }

    def _check_state(self, state: dict[str, Any]) -> None:
        """Check a state before anything is changed.

        Raises:
            ValueError: If it is not the state of such a watcher, or one of another model.
        """
        kind = type(self).__name__
        if state.get("kind") != kind:
            raise ValueError(
                f"state_dict is not the state of a {kind}: it holds "
                f"{', '.join(state) or 'nothing'}; pass what {kind.lower()}.state_dict() returned"
            )
        self.follow_parameters()
        if state["fingerprint"] != self._parameters.fingerprint():
            raise ValueError(
                "state_dict belongs to another model or optimizer: it was saved with "
                f"{_describe(state['fingerprint'])}, this {kind.lower()} has "
                f"{_describe(self._parameters.fingerprint())}; load it with the model and "
                "parameter groups it was saved with"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state. What is as large as the parameters is its "mean"."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        raise NotImplementedError

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that make a copy."""
        return {"optimizer": self._optimizer, "every": self._every}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; hooks are not copied with an optimizer."""
        state, rest = self.state_dict(), io.BytesIO()
        mean = state.pop("mean", None)
        # As bytes: a process that is spawned gets tensors as memory that it shares, which those of
        # a state, made for the copy, do not outlive. The mean is there anyway.
        torch.save(state, rest)
        made = {"arguments": self._arguments(), "attached": self.is_attached}
        return {**made, "mean": mean, "state_dict": rest.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach the copy to its own optimizer."""
        self.__init__(**state["arguments"])
        rest = torch.load(io.BytesIO(state["state_dict"]))
        self.load_state_dict({**rest, "mean": state["mean"]})
        if not state["attached"]:
            self.detach()

    def _load_counters(self, state: dict[str, Any]) -> None:
        """Check a state, begin again, and restore what `_counters` returned."""
        self._check_state(state)
        self._every = state["every"]
        self._lay_out()
        self._step, self._start, self._next = state["step"], state["start"], state["next"]

    def __repr__(self) -> str:
        kind = type(self._optimizer).__name__
        return f"{type(self).__name__}({kind}, every={self._every}, step={self._step})"


def _describe(fingerprint: list[list[str]]) -> str:
    tensors = sum(map(len, fingerprint))
    return f"{tensors} tensors in {len(fingerprint)} group(s), such as {fingerprint[0][:1]}"
