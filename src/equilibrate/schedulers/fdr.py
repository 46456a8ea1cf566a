"""The paper's schedule: lower the learning rate when FDR1 says that training has equilibrated."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equilibrate._arguments import check_steps, lies_between
from equilibrate.monitor.monitor import Monitor
from equilibrate.readings import Reading, check_threshold, in_words
from equilibrate.schedulers.decision import Decision
from equilibrate.watching.hooks import unwrap
from equilibrate.watching.rates import check_min_lr, lower_bounds, read_lrs, write_lrs

_IDLE = 50
"""Calls without a step after which to warn: more than most loops accumulate gradients over."""
_IDLE_FROM_THE_START = 3
"""Calls before the first step after which to ask whether the parameters have changed."""


@runtime_checkable
class Rule(Protocol):
    """What `FDRScheduler` asks of a rule.

    A rule is an object with one method. If it is a dataclass, its fields are its settings, which
    are saved and restored with the scheduler. One that needs more than a reading may have a method
    `follow(monitor)`, which is called whenever `step()` is and at least `min_steps` optimizer steps
    have passed, and after each restart, and methods `state_dict()` and
    `load_state_dict(state_dict, monitor)` for what it records; see `stationarity.Stationary`.

    Example:
        >>> @dataclass(frozen=True)
        ... class After:
        ...     steps: int = 1000
        ...
        ...     def judge(self, reading: Reading) -> tuple[bool, str]:
        ...         return reading.count >= self.steps, f"{reading.count} steps"
    """

    def judge(self, reading: Reading) -> tuple[bool, str]:
        """Return whether to act on a reading, and why."""
        ...


@dataclass(frozen=True, slots=True)
class Threshold:
    """The paper's rule, section 3.3: equilibrated if |L̄/R̄ − 1| is below a threshold.

    The standard error of a reading does not enter the decision, as in the paper. If it is above the
    threshold the reason says so, and after how many steps it will not be any more. A weight
    norm that turns around crosses the threshold once on the way.

    Args:
        threshold: The paper's X.

    Raises:
        ValueError: If the threshold is not a positive finite number.

    Example:
        >>> rule = Threshold(0.01)
        >>> rule.judge(Reading(step=600, count=300, left=0.995, right=1.0, lr=0.1))
        (True, 'equilibrated: |L/R − 1| = 0.005 < 0.01')
        >>> rule.judge(Reading(step=600, count=300, left=0.0, right=0.0, lr=0.1))[0]
        False
        >>> noisy = Reading(600, 300, left=1.04, right=1.0, lr=0.1, stderr=0.03, margin=0.06)
        >>> print(rule.judge(noisy)[1])
        not yet: |L/R − 1| = 0.04 ≥ 0.01, but the standard error, 0.03, is above 0.01 too, for \
about 1,200 more steps
    """

    threshold: float = 0.01

    def __post_init__(self) -> None:
        """Check the threshold."""
        check_threshold(self.threshold)

    def judge(self, reading: Reading) -> tuple[bool, str]:
        """Return whether the reading is below the threshold, and why.

        Args:
            reading: What a monitor or a relation has read. An undefined one never equilibrates.
        """
        if reading.undefined is not None:
            return False, f"undefined: {reading.undefined}"
        size = abs(reading.residual)
        if size < self.threshold:
            reason = f"equilibrated: |L/R − 1| = {size:.3g} < {self.threshold:g}"
        else:
            reason = f"not yet: |L/R − 1| = {size:.3g} ≥ {self.threshold:g}"
        return size < self.threshold, reason + self._noise(reading)

    def _noise(self, reading: Reading) -> str:
        """Return a remark on the standard error if it is above the threshold.

        A drift beyond its 95 % interval is not noise.
        """
        drifts = abs(reading.residual) > max(reading.margin, self.threshold)
        if drifts or not reading.stderr > self.threshold:
            return ""
        if abs(reading.residual) < self.threshold:
            return f" (standard error {reading.stderr:.2g})"
        more = in_words(reading.further_steps(self.threshold))
        remark = f", but the standard error, {reading.stderr:.2g}, is above {self.threshold:g} too"
        return f"{remark}, for about {more} more steps"


class FDRScheduler(LRScheduler):
    """Multiplies the learning rate by a factor whenever training has equilibrated.

    This is the paper's adaptive schedule: if |L̄/R̄ − 1| < X, the learning rate becomes (1 − Y)η
    and the averages restart. Call `step()` at the end of each epoch, as with any torch scheduler;
    calling it at every batch is safe too, since `min_steps` optimizer steps lie between decisions.
    The *current* learning rate of each group is multiplied, so it can follow a warm-up. In
    `SequentialLR` it starts at the initial learning rate.

    In trainings of a few thousand steps it rarely acts, and a `Cooldown` ends better.

    Args:
        optimizer: Any `torch.optim.Optimizer`.
        threshold: The paper's X.
        factor: Factor by which the learning rate is multiplied, the paper's 1 − Y.
        rule: A rule instead of the threshold: `stationarity.Stationary()`, or your own.
        min_lr: Lower bound on the learning rate, one number or one for each parameter group.
        min_steps: Optimizer steps that must lie in the averaging window, and between two checks
            of the rule. The window is the later half of the steps since the last lowering.
        monitor: The monitor to read, if it is also used elsewhere or has settings of its own.
        last_epoch: The index of the last epoch, as for any torch scheduler.

    Raises:
        TypeError: If `monitor` is not a `Monitor`, or `rule` has no method `judge`.
        ValueError: If a number is out of range, or the monitor watches another optimizer.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scheduler = FDRScheduler(optimizer, threshold=0.01, factor=0.9)
        >>> scheduler.last_decision.reason
        'started: the averaging window begins here'
    """

    def __init__(
        self,
        optimizer: Optimizer,
        threshold: float = 0.01,
        factor: float = 0.9,
        *,
        rule: Rule | None = None,
        min_lr: float | Sequence[float] = 0.0,
        min_steps: int = 100,
        monitor: Monitor | None = None,
        last_epoch: int = -1,
    ) -> None:
        optimizer = unwrap(optimizer)
        if not lies_between(factor, 0, 1):
            raise ValueError(f"factor must lie between 0 and 1, such as 0.9, got {factor!r}")
        _check_rule(rule)
        self.rule: Rule = rule or Threshold(threshold)
        self.min_steps = check_steps("min_steps", min_steps)
        self.monitor = Monitor(optimizer) if monitor is None else _checked(monitor, optimizer)
        self.factor = float(factor)
        self.min_lr = check_min_lr(optimizer, min_lr)
        self.last_decision: Decision
        """What was decided the last time that the rule was asked."""
        self.decisions: deque[Decision] = deque(maxlen=256)
        """The decisions of this process, the newest last. Not saved with the state."""
        self._due = self._followed = 0
        """Step before which the rule is not asked, and that at which it last followed."""
        self._idle = 0
        """Calls since a step was last seen."""
        self._seen = 0
        self._told_undone = False
        super().__init__(optimizer, last_epoch)

    def step(self, epoch: int | None = None) -> None:
        """Decide whether to lower the learning rates, and set them.

        If parameters are sharded over processes every process must call it. All of them come to
        the same decision.

        Args:
            epoch: Deprecated by torch; do not pass it. 0 starts at the initial learning rate, as
                `SequentialLR` asks for. Other numbers do not change the decision.

        Raises:
            TypeError: If something else is passed, such as a loss.
        """
        if epoch is not None and not isinstance(epoch, int):
            raise TypeError(
                f"step() of an FDRScheduler takes no loss, got {type(epoch).__name__}: call "
                "scheduler.step()"
            )
        self._step_count += 1
        self._update_lr(epoch)

    def _update_lr(self, epoch: int | None = None) -> None:  # `SequentialLR` calls it, too
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if getattr(self, "_is_initial", False) or epoch == 0:
            if epoch == 0:
                write_lrs(self.optimizer, [float(lr) for lr in self.base_lrs])
            self._start()
        elif (decision := self._decide()) is not None:
            self.last_decision = decision
            self.decisions.append(decision)
            if decision.lowered:
                write_lrs(self.optimizer, decision.lrs)
                self.restart()
        self._last_lr: list[Any] = [group["lr"] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group. Nothing is changed."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def restart(self) -> None:
        """Restart all averages, as after a lowering. The learning rate stays as it is."""
        self.monitor.reset()
        self._due = self.monitor.step + self.min_steps
        self._follow()

    def detach(self) -> None:
        """Remove the hooks of the monitor. The learning rate is not lowered any more."""
        self.monitor.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler and its monitor, which `torch.load` reads by default.

        Under sharded training every process must call it.
        """
        own = getattr(self.rule, "state_dict", dict)()
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "last_lr": [float(lr) for lr in self._last_lr],
            "base_lrs": [float(lr) for lr in self.base_lrs],
            "rule": _settings_of(self.rule),
            "of_rule": own,
            "factor": self.factor,
            "min_lr": self.min_lr,
            "min_steps": self.min_steps,
            "due": [self._due, self._followed],
            "decision": self.last_decision.state_dict(),
            "monitor": self.monitor.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, its settings included.

        Raises:
            ValueError: If it is not the state of an FDRScheduler.
        """
        if "monitor" not in state_dict:
            raise ValueError(
                "state_dict is not the state of an FDRScheduler: it holds "
                f"{', '.join(state_dict) or 'nothing'}; pass what scheduler.state_dict() returned"
            )
        self.rule = _with_settings(self.rule, state_dict["rule"])
        self.monitor.load_state_dict(state_dict["monitor"])
        for name in ("factor", "min_lr", "min_steps", "last_epoch"):
            setattr(self, name, state_dict[name])
        self._step_count = state_dict["step_count"]
        self._last_lr = list(state_dict["last_lr"])
        self.base_lrs = list(state_dict["base_lrs"])
        self._due, self._followed = state_dict["due"]
        self.last_decision = Decision.from_state_dict(state_dict["decision"])
        self.decisions.clear()
        if hasattr(self.rule, "load_state_dict"):
            cast("Any", self.rule).load_state_dict(state_dict["of_rule"], self.monitor)

    def __repr__(self) -> str:
        return f"FDRScheduler({self.rule}, factor={self.factor:g}, {self.last_decision.reason!r})"

    def _start(self) -> None:
        self.restart()
        reason = "started: the averaging window begins here"
        lrs, reading = tuple(read_lrs(self.optimizer)), self.monitor.reading()
        self.last_decision = Decision(self.monitor.step, False, reason, lrs, reading)

    def _decide(self) -> Decision | None:
        """Return a decision, or None if there is nothing to decide yet."""
        step = self.monitor.step
        self._warn_if_idle(step)
        if step - self._followed >= self.min_steps:
            self._follow()
        if step < self._due:  # a reading would wait for the device
            return None
        reading = self.monitor.reading()
        if 0 < reading.count < self.min_steps:
            # The window has half of the steps, up to the last one that was measured.
            lacking = 2 * (self.min_steps - reading.count) - 2 * self.monitor.every
            self._due = step + max(1, lacking)
            return None
        self._due = step + self.min_steps
        current = read_lrs(self.optimizer)
        self._warn_if_undone(current)
        act, reason = self.rule.judge(reading)
        lows = lower_bounds(self.optimizer, self.min_lr)
        lowered = [
            max(self.factor * lr, min(low, lr)) for lr, low in zip(current, lows, strict=True)
        ]
        if act and all(map(math.isclose, lowered, current)):
            act, reason = False, f"{reason}, but lr is at min_lr"
        return Decision(step, act, reason, tuple(lowered if act else current), reading)

    def _warn_if_idle(self, step: int) -> None:
        """Warn once if the optimizer that is watched makes no steps."""
        self._idle = self._idle + 1 if step == self._seen else 0
        self._seen = step
        if self._idle == _IDLE_FROM_THE_START and step == 0:
            self.monitor.reading()  # it warns of steps that it has not seen
        if self._idle == _IDLE and any(read_lrs(self.optimizer)):
            warnings.warn(
                f"no optimizer step was seen in {_IDLE} calls of step(): step the optimizer that "
                "the scheduler was created with, and wrap compiled or captured steps in "
                "`with eq.measure(optimizer):`",
                stacklevel=5,
            )

    def _warn_if_undone(self, current: list[float]) -> None:
        """Warn once if something has raised the learning rate since it was lowered."""
        last = self.last_decision
        raised = [(a, b) for a, b in zip(last.lrs, current, strict=False) if b > a * (1 + 1e-9)]
        if last.lowered and raised and not self._told_undone:
            self._told_undone = True
            warnings.warn(
                "the learning rate was lowered to {:g}, but something has set it to {:g} "
                "since: remove the other scheduler, or put it first, in a SequentialLR".format(
                    *raised[0]
                ),
                stacklevel=5,
            )

    def _follow(self) -> None:
        self._followed = self.monitor.step
        if hasattr(self.rule, "follow"):
            cast("Any", self.rule).follow(self.monitor)


def _check_rule(rule: object) -> None:
    if isinstance(rule, type):
        name = rule.__name__
        raise TypeError(f"rule must be an instance, got the class {name}: pass {name}()")
    if rule is not None and not isinstance(rule, Rule):
        raise TypeError(
            f"rule must have a method judge(reading), got {type(rule).__name__}: pass "
            "eq.Threshold(0.01), or leave it out"
        )


def _checked(monitor: Any, optimizer: Optimizer) -> Monitor:
    if not isinstance(monitor, Monitor):
        kind = type(monitor).__name__
        raise TypeError(f"monitor must be an eq.Monitor, got {kind}: pass eq.Monitor(optimizer)")
    if monitor.optimizer is not optimizer:
        raise ValueError("monitor watches another optimizer: pass eq.Monitor(optimizer)")
    return monitor


def _settings_of(rule: Rule) -> dict[str, Any]:
    """Return the fields of a rule, and the name of its class as "name".

    NumPy's numbers become Python's, which `torch.load` reads by default.
    """
    names = [field.name for field in fields(rule) if field.init] if is_dataclass(rule) else []
    found = {name: getattr(rule, name) for name in names}
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in found.items()}
    return {"name": type(rule).__name__, **plain}


def _with_settings(rule: Rule, settings: dict[str, Any]) -> Rule:
    """Return a rule of the same class with other settings; itself if it is not a dataclass.

    Raises:
        ValueError: If the settings are of another class.
    """
    found = dict(settings)
    if (kind := found.pop("name")) != type(rule).__name__:
        raise ValueError(
            f"state_dict was saved with the rule {kind}, this scheduler has "
            f"{type(rule).__name__}: construct it with the same kind of rule"
        )
    return replace(cast("Any", rule), **found) if is_dataclass(rule) else rule
