"""What the callbacks of all trainers have in common: one optimizer, watched or scheduled."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from equilibrate._engine.cooldown.loss_record import over_processes
from equilibrate._engine.optimizer.names import NamedParameters
from equilibrate.decisions import Decision
from equilibrate.forecast import Forecaster
from equilibrate.monitor import Monitor
from equilibrate.record.observe import scalars
from equilibrate.rules import Rule, needs_of
from equilibrate.scheduler import FDRScheduler


class Settings(TypedDict, total=False):
    """Arguments of `Monitor` and `FDRScheduler` that a callback passes on. Their defaults apply.

    `cooldown_end="end"` is the end of the training, which the trainer knows.
    """

    every: int
    scale_invariant: bool
    threshold: float | None
    factor: float
    rule: Rule | None
    cooldown_end: int | Literal["end"] | None
    min_lr: float | Sequence[float]
    min_steps: int


_OF_MONITOR = ("every", "scale_invariant")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a callback was asked to do, checked before there is an optimizer.

    Raises:
        ValueError: If a setting is out of range, or one of the scheduler's is given to a callback
            that does not schedule.
    """

    settings: Settings
    schedule: bool = True
    interval: Literal["epoch", "step"] = "epoch"
    layers: bool = False
    horizons: Sequence[int] | None = None
    evaluate_averaged: bool = False
    to_the_end: bool = False
    """Whether `cooldown_end` was the end of the training, and is now its number."""

    def __post_init__(self) -> None:
        if self.interval not in ("epoch", "step"):
            raise ValueError(f"interval must be 'epoch' or 'step', got {self.interval!r}")
        if self.of_scheduler and not self.schedule:
            raise ValueError(
                f"{', '.join(self.of_scheduler)} is for schedules, but schedule=False: leave it "
                "out, or set schedule=True"
            )
        if isinstance(self.horizons, Iterator):  # it is read more than once
            object.__setattr__(self, "horizons", tuple(self.horizons))
        # The settings are checked where they are used, on an optimizer that is thrown away.
        weights = [nn.Parameter(torch.zeros(1, device="cpu")) for _ in range(self._groups)]
        groups = [{"params": [weight]} for weight in weights]
        trial = torch.optim.SGD(groups, lr=0.1)
        self.watch(trial, None)
        self.forecast(trial)
        if self.schedule:
            settings: dict[str, Any] = dict(self.settings)
            if self._lasts_to_the_end:
                del settings["cooldown_end"]  # checked when the trainer knows it
            FDRScheduler(trial, **settings)

    @property
    def _lasts_to_the_end(self) -> bool:
        return self.settings.get("cooldown_end") == "end"

    def with_length(self, count: Callable[[], float]) -> Plan:
        """Return the plan for a training, with a number for `cooldown_end="end"`.

        Args:
            count: Returns the optimizer steps that the training will make; infinity, or a negative
                number, if they are unknown. It is only called if the plan needs them.

        Returns:
            The plan; without a cooldown if there are no steps left.

        Raises:
            ValueError: If it needs the steps, and they are unknown.
        """
        if not self._lasts_to_the_end:
            return self
        steps = count()
        if steps == 0:
            return replace(self, settings={**self.settings, "cooldown_end": None})
        if not math.isfinite(steps) or steps < 0:
            raise ValueError(
                "cooldown_end='end', but the trainer does not know how many optimizer steps it "
                "will make: limit them, or pass their number as cooldown_end"
            )
        settings: Settings = {**self.settings, "cooldown_end": int(steps)}
        return replace(self, settings=settings, to_the_end=True)

    @property
    def _groups(self) -> int:
        """The number of parameter groups that `min_lr` is for; 1 if it is one number."""
        min_lr: Any = self.settings.get("min_lr", 0.0)
        try:
            return max(1, len(min_lr))
        except TypeError:  # a number, or an array that is one
            return 1

    @property
    def of_scheduler(self) -> dict[str, Any]:
        """The settings of the scheduler."""
        return {k: v for k, v in self.settings.items() if k not in _OF_MONITOR}

    @property
    def needs(self) -> frozenset[str]:
        """What the rule needs besides a reading."""
        return needs_of(self.settings.get("rule"))

    def watch(self, optimizer: Optimizer, named_parameters: NamedParameters | None) -> Monitor:
        """Return a monitor of an optimizer."""
        settings: dict[str, Any] = {k: v for k, v in self.settings.items() if k in _OF_MONITOR}
        names = named_parameters if self.layers else None
        trace = "trace" in self.needs
        return Monitor(optimizer, named_parameters=names, trace=trace, **settings)

    def forecast(self, optimizer: Optimizer) -> Forecaster | None:
        """Return a forecaster, or None if nothing needs one."""
        needed = self.evaluate_averaged or "forecasts" in self.needs
        if self.horizons is None and not needed:
            return None
        if "every" in self.settings:
            return Forecaster(optimizer, self.horizons, self.settings["every"])
        return Forecaster(optimizer, self.horizons)


class Attached:
    """A monitor, and a scheduler if the plan asks for one, on one optimizer of a trainer."""

    def __init__(
        self,
        optimizer: Optimizer,
        plan: Plan,
        *,
        start: int,
        named_parameters: NamedParameters,
        others: Iterable[Any] = (),
    ) -> None:
        self.monitor = plan.watch(optimizer, named_parameters)
        self.forecaster = plan.forecast(optimizer)
        self.scheduler: FDRScheduler | None = None
        if plan.schedule:
            settings = plan.of_scheduler
            if "forecasts" in plan.needs:
                settings["forecaster"] = self.forecaster
            self.scheduler = FDRScheduler(optimizer, monitor=self.monitor, **settings)
            self.scheduler.follows_cooldown = True
        self._plan = plan
        self._others = list(_flattened(others))
        self._seen = 0
        self._start = start
        self._started = not start
        self._lowered = False
        """Whether the learning rate was lowered since the last `scalars`."""
        self._lowered_to: list[float] = []
        self._loss: float | Tensor | None = None
        """The sum of the losses since the last decision; None if there was none."""
        self._loss_steps = 0.0
        """Number of steps that they are of, including those that gradient scaling has skipped."""

    @property
    def needs_loss(self) -> bool:
        """Whether the rule needs the training loss."""
        return "losses" in self._plan.needs

    def add_loss(self, loss: Tensor, micro_batches: int = 1) -> None:
        """Hand over the loss of a step, or the share of a micro-batch. Nothing is waited for.

        Args:
            loss: The loss, divided by the number of micro-batches.
            micro_batches: By which number it was divided.
        """
        if self.needs_loss:
            self._loss = loss.detach().double() + (0.0 if self._loss is None else self._loss)
            self._loss_steps += 1 / micro_batches

    def advance(self, *, epoch_ended: bool) -> Decision | None:
        """Take note of the steps since the last call, and decide if it is time to.

        Args:
            epoch_ended: Whether the last step was the last one of an epoch.

        Returns:
            The decision, or None if none was due.
        """
        step = self.monitor.step
        if step == self._seen:  # gradients were accumulated, or this step was judged already
            scheduler = self.scheduler
            if scheduler is not None and scheduler.cools_down and not any(scheduler.current_lrs()):
                scheduler.step()  # steps at a rate of 0 are not counted: it warns of them
            return None
        if not self._started and step >= self._start:
            self._begin()
            return None
        if self.scheduler is None or not self._started:
            return None
        due = epoch_ended or self._plan.interval == "step" or self.scheduler.cools_down
        if not due:
            return None
        loss = None if self._loss is None else self._loss / self._loss_steps
        self._seen, self._loss, self._loss_steps = step, None, 0.0
        before = self.scheduler.current_lrs()
        self._warn_if_undone(before)
        self.scheduler.step(loss)
        decision = self.scheduler.last_decision
        self._lowered |= decision.lowered
        if decision.lowered or list(decision.lrs) != before:  # or a cooldown continues
            self._lowered_to = list(decision.lrs)
            for other in self._others:
                _rescale(other, before, decision.lrs)
        return decision

    @contextmanager
    def averaged(self, model: nn.Module) -> Iterator[None]:
        """Give the model averaged parameters for an evaluation, if the plan asks for that.

        Before the first step there are none, and in a cooldown its own are better: it keeps them.
        """
        forecaster = self.forecaster if self._plan.evaluate_averaged else None
        cools_down = self.scheduler is not None and self.scheduler.cools_down
        if forecaster is None or cools_down or not forecaster.has_averages:
            yield
        else:
            with forecaster.averaged(model=model):
                yield

    def scalars(self) -> dict[str, float]:
        """Return the current numbers by name, for a logger, each lowering once."""
        sources = [self.scheduler or self.monitor, *filter(None, [self.forecaster])]
        found = scalars(*sources, layers=self._plan.layers)
        if self.scheduler is not None:
            found["equilibrate/lowered"] = float(self._lowered)
            self._lowered = False
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, strings and tensors.

        Every process must call it if the rule needs losses: those of all processes are averaged.
        """
        if self.scheduler is not None:
            self.scheduler.share_losses()
        if self._loss is not None:
            alone = torch.tensor([float(self._loss), 1.0], dtype=torch.float64, device="cpu")
            total, processes = over_processes(alone).tolist()
            self._loss = total / processes
        return {
            "schedule": self.scheduler is not None,
            "seen": self._seen,
            "started": self._started,
            "lowered_to": self._lowered_to,
            "loss": self._loss,
            "loss_steps": self._loss_steps,
            "state": (self.scheduler or self.monitor).state_dict(),
            "forecaster": self._own_forecaster_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, or only that of the monitor if the other callback did not schedule.

        Args:
            state_dict: What `state_dict` returned.
        """
        self._started = state_dict["started"]
        state = state_dict["state"]
        if self.scheduler is not None and state_dict["schedule"]:
            self.scheduler.load_state_dict(state)
            self._follow_the_end(self.scheduler)
        else:
            self.monitor.load_state_dict(state["monitor"] if state_dict["schedule"] else state)
        if self.forecaster is not None and state_dict["forecaster"] is not None:
            self.forecaster.load_state_dict(state_dict["forecaster"])
        self._seen = state_dict["seen"]
        self._loss = state_dict["loss"]
        # States of earlier versions do not have it. They took it for the number of steps.
        self._loss_steps = state_dict.get("loss_steps", float(self.monitor.step - self._seen))
        self._lowered_to = list(state_dict["lowered_to"])

    def _follow_the_end(self, scheduler: FDRScheduler) -> None:
        """Move the end of a cooldown if the training was made longer or shorter since."""
        end: Any = self._plan.settings.get("cooldown_end")
        if self._plan.to_the_end and self.monitor.step < end != scheduler.cooldown_end:
            scheduler.cooldown_end = end

    def _own_forecaster_state(self) -> dict[str, Any] | None:
        """Return the state of a forecaster that is not part of the scheduler's."""
        shared = self.scheduler is not None and self.scheduler.forecaster is not None
        return None if self.forecaster is None or shared else self.forecaster.state_dict()

    def _begin(self) -> None:
        """Begin the first window, after the warm-up."""
        self._started, self._seen = True, self.monitor.step
        self._loss, self._loss_steps = None, 0.0
        if self.scheduler is not None:
            self.scheduler.restart()
            return
        self.monitor.reset()
        if self.forecaster is not None:
            self.forecaster.reset()

    def _warn_if_undone(self, now: Sequence[float]) -> None:
        """Warn if another scheduler has raised a learning rate that was lowered."""
        lowered, self._lowered_to = self._lowered_to, []
        # Groups that were added since, as by fine-tuning callbacks, were not lowered.
        if any(lr > low * (1 + 1e-6) for lr, low in zip(now, lowered, strict=False)):
            names = ", ".join(type(other).__name__ for other in self._others) or "something else"
            warnings.warn(
                f"the learning rate was lowered to {lowered} and is {now} again: {names} sets it. "
                "Leave the learning rate constant between lowerings: use no other scheduler, or "
                "one that multiplies the current rate, such as LinearLR for a warm-up",
                stacklevel=4,
            )


def named(attached: Sequence[Attached]) -> dict[str, float]:
    """Return the numbers of several optimizers, numbered if there are more than one."""
    if len(attached) == 1:
        return attached[0].scalars()
    return {
        name.replace("/", f"/optimizer_{i}/", 1): value
        for i, one in enumerate(attached)
        for name, value in one.scalars().items()
    }


def warn_of_missing_state(plan: Plan, step: int) -> None:
    """Warn that a training continues from a checkpoint that does not have our state."""
    words = "the averaging window begins here"
    if (end := plan.settings.get("cooldown_end")) not in (None, "end"):
        words += f", and so does the count of steps: the cooldown will end at step {step + end}"
    warnings.warn(
        f"the checkpoint of step {step} holds no state of equilibrate: {words}", stacklevel=4
    )


def warn_of_statistics(plan: Plan, model: nn.Module) -> None:
    """Warn if running statistics would not fit the parameters in evaluations."""
    tracking = (m.training and getattr(m, "track_running_stats", False) for m in model.modules())
    if plan.evaluate_averaged and any(tracking):
        warnings.warn(
            "evaluate_averaged=True, but the running statistics of BatchNorm do not fit averaged "
            "parameters, and evaluations will be wrong: evaluate yourself, inside `with "
            "forecaster.averaged(model=model)`, after torch.optim.swa_utils.update_bn",
            stacklevel=4,
        )


def _flattened(schedulers: Iterable[Any]) -> Iterator[LRScheduler]:
    """Yield schedulers, and those inside `SequentialLR`, `ChainedScheduler` and accelerate's."""
    for scheduler in schedulers:
        inner = getattr(scheduler, "_schedulers", None) or getattr(scheduler, "scheduler", None)
        if inner is None:
            yield scheduler
        else:
            yield from _flattened(inner if isinstance(inner, list) else [inner])


def _rescale(scheduler: LRScheduler, before: Sequence[float], after: Sequence[float]) -> None:
    """Make a scheduler that computes rates from `base_lrs` continue at the lowered ones.

    A `LambdaLR` sets base × λ(t) at every step, and so would undo the lowering. Most others
    multiply the current rate.
    """
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [
            new if base == old else base * new / old
            for base, old, new in zip(scheduler.base_lrs, before, after, strict=True)
        ]
