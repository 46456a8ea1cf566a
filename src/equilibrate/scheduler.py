"""Lower the learning rate when FDR1 says that training has equilibrated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equilibrate._arguments import check_steps
from equilibrate._engine.cooldown.line import Line
from equilibrate._engine.optimizer.hooks import unwrap
from equilibrate._engine.optimizer.rates import LearningRates, lower_bounds
from equilibrate._watchers import RuleInputs, forecaster_for, monitor_for
from equilibrate.decisions import Decision, Judgement
from equilibrate.layers import Layer, by_name
from equilibrate.monitor import Monitor
from equilibrate.readings import Reading
from equilibrate.rules import Rule, Threshold, check_factor, needs_of
from equilibrate.rules.base import check_rule, settings_of, with_settings, with_total_steps

if TYPE_CHECKING:
    from equilibrate.forecast import Forecaster


class FDRScheduler(LRScheduler):
    """Multiplies the learning rate by a factor whenever training has equilibrated.

    This is the paper's adaptive schedule: if |L̄/R̄ − 1| < X, the learning rate becomes (1 − Y)η
    and the averages restart. Call `step()` at the end of each epoch, as with any torch scheduler;
    calling it at every batch is safe too, since `min_steps` optimizer steps lie between decisions.
    The *current* learning rate of each group is multiplied, so it can follow a warm-up. In
    `SequentialLR` it starts at the initial learning rate.

    Args:
        optimizer: Any `torch.optim.Optimizer`.
        threshold: The paper's X. Short for `rule=rules.Threshold(threshold)`.
        factor: Factor by which the learning rate is multiplied, the paper's 1 − Y.
        rule: A rule of `equilibrate.rules`, or your own, instead of `threshold`.
        cooldown_end: The optimizer step at which the training ends, counted from the creation of
            the scheduler, or of `monitor`. The first decision to lower the learning rate then
            begins a linear cooldown to zero, or to `min_lr`, that ends there, and the rule is not
            asked again. It begins when a tenth of the steps is left if there was no decision. The
            rate changes when `step()` is called, so call it after every optimizer step. A decision
            at that step or later multiplies by `factor` instead. A rule with a field `total_steps`
            is told the number of steps.
        min_lr: Lower bound on the learning rate, one number or one for each parameter group.
        min_steps: Optimizer steps that must lie in the averaging window, and between two checks
            of the rule. The window is the later half of the steps since the last lowering.
        every: Measure every k-th step; see `Monitor`.
        scale_invariant: Whether weights whose norm the loss does not depend on, such as those
            before a normalisation layer, take part in the decision; see `Monitor`.
        monitor: The monitor to read, if it is also used elsewhere.
        forecaster: The forecaster to read, if the rule needs forecasts and it is also used
            elsewhere.
        last_epoch: The index of the last epoch, as for any torch scheduler.

    Raises:
        TypeError: If `monitor` is not a `Monitor`, `forecaster` not a `Forecaster`, or `rule` has
            no method `judge`.
        ValueError: If a number is out of range, arguments exclude each other, or the monitor or
            the forecaster watches another optimizer or the monitor does not record what the rule
            needs.

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
        *,
        threshold: float | None = None,
        factor: float = 0.9,
        rule: Rule | None = None,
        cooldown_end: int | None = None,
        min_lr: float | Sequence[float] = 0.0,
        min_steps: int = 100,
        every: int | None = None,
        scale_invariant: bool | None = None,
        monitor: Monitor | None = None,
        forecaster: Forecaster | None = None,
        last_epoch: int = -1,
    ) -> None:
        optimizer = unwrap(optimizer)
        check_factor(factor)
        if threshold is not None and rule is not None:
            raise ValueError("threshold and rule exclude each other: give one of them")
        check_rule(rule)
        self.min_steps = check_steps("min_steps", min_steps)
        self.monitor = monitor_for(
            rule, optimizer, monitor, every=every, scale_invariant=scale_invariant
        )
        self._rule = rule or (Threshold() if threshold is None else Threshold(threshold))
        self.forecaster = forecaster_for(rule, optimizer, forecaster, every=every)
        self._inputs = RuleInputs(self._rule, self.forecaster)
        self._line: Line | None = None
        self._rates = LearningRates(optimizer)
        if cooldown_end is not None:
            self.cooldown_end = cooldown_end
        self.follows_cooldown = False
        """Whether `step()` is called at every step of a cooldown, even if rarely before it."""
        self.factor = float(factor)
        bounds = lower_bounds(optimizer, min_lr)
        self.min_lr = bounds[0] if isinstance(min_lr, Real) else list(bounds)
        self.last_decision: Decision
        self.judgements: deque[Judgement] = deque(maxlen=256)
        """What the rule decided in this process, the newest last. Not saved with the state."""
        self.keep_layers = False
        """Whether to read the layers before a lowering restarts the window."""
        self.kept_layers: dict[str, Layer] = {}
        """The layers at the last lowering, if `keep_layers` is set."""
        self._seen = self._marked = self.monitor.step
        self._due = 0
        """The step before which the rule is not asked."""
        super().__init__(optimizer, last_epoch)

    @property
    def rule(self) -> Rule:
        """The rule. Another one can be set if it needs nothing that the first one did not."""
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        check_rule(rule)
        if missing := needs_of(rule) - self._inputs.provided:
            raise ValueError(
                f"{type(rule).__name__} needs {', '.join(sorted(missing))}, which this scheduler "
                "does not record: create it with this rule"
            )
        end = self.cooldown_end
        self._rule = rule if end is None else with_total_steps(rule, end)

    @property
    def cooldown_end(self) -> int | None:
        """The step at which the cooldown ends. If it is moved, one that has begun continues."""
        return None if self._line is None else self._line.end

    @cooldown_end.setter
    def cooldown_end(self, step: int) -> None:
        line, last = Line(check_steps("cooldown_end", step)), self._line
        if self.monitor.step >= line.end:
            raise ValueError(
                f"cooldown_end is {line.end}, but the monitor has seen {self.monitor.step} steps "
                "already, which count: pass a later step"
            )
        self._rule = with_total_steps(self._rule, line.end, before=self.cooldown_end)
        if last is not None and last.begun and any(current := self.current_lrs()):
            line.begin(self.monitor.step, current)
        self._line = line

    @property
    def cools_down(self) -> bool:
        """Whether the cooldown of `cooldown_end` has begun, or has to."""
        line = self._line
        return line is not None and (line.begun or line.is_due(self.monitor.step))

    @property
    def min_lrs(self) -> tuple[float, ...]:
        """The lower bound on the learning rate of each group."""
        return lower_bounds(self.optimizer, self.min_lr)

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  # as ReduceLROnPlateau's
        self, loss: float | Tensor | None = None, epoch: int | None = None
    ) -> None:
        """Decide whether to lower the learning rates, and set them.

        If parameters are sharded over processes, or the rule needs losses and there are several
        processes, every process must call it. All of them come to the same decision.

        Args:
            loss: The mean training loss since the last call, or the loss of the last batch, for
                rules that need it, as with `ReduceLROnPlateau`. A tensor is not waited for. Other
                rules ignore it. An int is taken for an epoch, as torch's own schedulers do, and
                anything that is not one number raises a `TypeError`.
            epoch: Deprecated by torch; do not pass it. 0 starts at the initial learning rate. Other
                numbers do not change the decision.
        """
        if type(loss) is int:
            loss, epoch = None, loss
        if loss is not None:
            self._inputs.add_loss(self.monitor.step, loss)
        if getattr(self, "_is_initial", False):
            self._start(self.current_lrs())
            super().step(epoch)
            return
        if epoch == 0:  # `SequentialLR` has reached a milestone: the window begins here
            super().step(epoch)
            return
        last, decision = self.last_decision, self._decide()
        self.last_decision = decision
        if decision.reading is not last.reading:  # the rule was asked
            made = decision.lowered, decision.reason, decision.lrs
            self.judgements.append(Judgement(self.monitor.step, *made))
        if decision.lowered:
            self.kept_layers = by_name(self.monitor, self.rule) if self.keep_layers else {}
        with self._rates.kept(decision.lrs):
            super().step(epoch)
        self._rates.note(decision.lrs)
        if decision.lowered:
            self.restart()  # after the learning rate is set, with which a trace begins

    def __repr__(self) -> str:
        return f"FDRScheduler({self.rule}, factor={self.factor:g}, {self.last_decision.reason!r})"

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group as last decided. Nothing is changed."""
        return list(self.last_decision.lrs)

    def current_lrs(self) -> list[float]:
        """Return the learning rate of each group, whoever set it.

        A tensor is waited for only if somebody else has changed it.
        """
        return self._rates.read()

    def share_losses(self) -> None:
        """Give all processes the same losses, so that the state of one is right for all.

        A checkpoint that one process writes otherwise holds its own losses since the last check.
        Every process must call it. Without a rule that needs losses it does nothing.
        """
        self._inputs.share_losses()

    def restart(self) -> None:
        """Restart all averages, as after a lowering. The learning rate stays as it is."""
        self.monitor.reset()
        self.monitor.mark()
        self._marked = self.monitor.step
        self._due = self._marked + self.min_steps
        self._inputs.restart(self.monitor.step)

    def detach(self) -> None:
        """Remove the hooks of the monitor. The learning rate is not lowered any more."""
        self.monitor.detach()
        if self.forecaster is not None:
            self.forecaster.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler and its monitor, which `torch.load` reads by default.

        Under sharded training every process must call it. The means of a forecaster are not copied;
        see `Forecaster.state_dict`.
        """
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "last_lr": [float(lr) for lr in self._last_lr],
            "base_lrs": [float(lr) for lr in self.base_lrs],
            "rule": settings_of(self.rule),
            "factor": self.factor,
            "min_lr": self.min_lr,
            "min_steps": self.min_steps,
            "seen": self._seen,
            "due": self._due,
            "marked": self._marked,
            "decision": self.last_decision.state_dict(),
            "cooldown": None
            if self._line is None
            else self._line.state_dict(len(self.optimizer.param_groups)),
            "monitor": self.monitor.state_dict(),
            **self._inputs.state_dict(),
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
        self._rule = with_settings(self.rule, state_dict["rule"])
        self.factor = state_dict["factor"]
        self.min_lr = state_dict["min_lr"]
        self.min_steps = state_dict["min_steps"]
        self.monitor.load_state_dict(state_dict["monitor"])
        self._inputs.load_state_dict(state_dict)
        self.judgements.clear()
        self._rates.forget()
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["step_count"]
        self._last_lr = list(state_dict["last_lr"])
        self.base_lrs = list(state_dict["base_lrs"])
        self._seen, self._due = state_dict["seen"], state_dict["due"]
        self._marked = state_dict["marked"]
        if (line := state_dict.get("cooldown")) is None:
            self._line = None
        else:
            self._line = self._line or Line(line["end"])
            self._line.load_state_dict(line)
            self._rule = with_total_steps(self.rule, self._line.end)
        self.last_decision = Decision.from_state_dict(state_dict["decision"])

    def _get_closed_form_lr(self) -> list[float | Tensor]:
        """Return the learning rates in an epoch that torch was given.

        `SequentialLR` starts with epoch 0 at a milestone, at the initial learning rates.
        """
        if self.last_epoch == 0:
            self._start([float(lr) for lr in self.base_lrs])
        return self.get_lr()

    def _start(self, lrs: Sequence[float]) -> None:
        self.restart()
        self._seen = self.monitor.step
        reason = "started: the averaging window begins here"
        self.last_decision = Decision(False, reason, self.monitor.reading(), tuple(lrs))

    def _decide(self) -> Decision:
        current = self.current_lrs()
        seen, self._seen = self._seen, self.monitor.step

        def wait(reason: str) -> Decision:
            # The last reading: a new one would wait for the device at every call.
            return Decision(False, reason, self.last_decision.reading, tuple(current))

        line = self._line
        if line is not None and not self.follows_cooldown:
            line.warn_if_rare(seen, self._seen)
        if line is not None and line.begun:
            return self._cool(line, current)
        if self._seen == seen and not any(current):
            return wait("lr is 0 in every parameter group: such steps are not counted")
        if self._seen == seen:
            return wait(
                "no optimizer step was seen since the last call: step the optimizer that the "
                "scheduler was created with; wrap compiled or captured steps in monitor.measure()"
            )
        if line is not None:
            line.warn_if_passed(seen, self._seen)
        if line is not None and line.is_due(self._seen):
            reading = self._inputs.complete(self.monitor.reading(), self.rule)
            verdict = self.rule.judge(reading)
            why = verdict.reason if verdict.act else f"no decision so far ({verdict.reason})"
            return self._begin(line, why, reading, current)
        if self._seen - self._marked >= self.min_steps:
            self.monitor.mark()
            self._marked = self._seen
        if self._seen < self._due:  # a reading would wait for the device
            return wait(f"too few steps: the next check is due at step {self._due}")
        reading = self.monitor.reading()
        self._due = self._next_check(reading)
        if 0 < reading.count < self.min_steps:
            return wait(f"too few steps: {reading.count} of {self.min_steps} in the window")
        verdict = self.rule.judge(reading := self._inputs.complete(reading, self.rule))
        lowered = [
            max(self.factor * lr, min(low, lr))
            for lr, low in zip(current, self.min_lrs, strict=True)
        ]
        if not verdict.act:
            return Decision(False, verdict.reason, reading, tuple(current))
        if all(map(math.isclose, lowered, current)):
            reason = f"{verdict.reason}, but lr is at min_lr"
            return Decision(False, reason, reading, tuple(current))
        if line is not None and self._seen < line.end:
            return self._begin(line, verdict.reason, reading, current)
        return Decision(True, verdict.reason, reading, tuple(lowered))

    def _next_check(self, reading: Reading) -> int:
        """Return the first step at which the rule can be asked after this reading."""
        if not 0 < reading.count < self.min_steps:
            return self._seen + self.min_steps
        # The window has half of the steps, up to the last one that was measured.
        every = self.monitor.every
        lacking = 2 * (self.min_steps - reading.count) - every - 1
        return self._seen + max(every - self.monitor.since_reset % every, lacking)

    def _begin(self, line: Line, why: str, reading: Reading, current: Sequence[float]) -> Decision:
        line.begin(self._seen, current)
        reason = f"{why}; cooling down linearly until step {line.end}"
        return Decision(True, reason, reading, tuple(current))

    def _cool(self, line: Line, current: Sequence[float]) -> Decision:
        lrs = line.lrs(self._seen, current, self.min_lrs)
        line.warn_if_overrun(self._seen, lrs)
        reason = line.reason(self._seen, lrs)
        return Decision(False, reason, self.last_decision.reading, tuple(lrs))
