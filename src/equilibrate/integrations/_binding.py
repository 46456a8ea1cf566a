"""What the callbacks of all trainers have in common: their arguments, and what they attach."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equilibrate.forecast.forecaster import Forecaster
from equilibrate.forecast.losses import check_loss
from equilibrate.integrations._replay import Bystanders, without_trace
from equilibrate.monitor.monitor import Monitor
from equilibrate.record.observe import Sources, scalars
from equilibrate.schedulers.cooldown import Cooldown
from equilibrate.schedulers.decision import Decision
from equilibrate.schedulers.fdr import FDRScheduler, Rule
from equilibrate.watching.rates import write_lrs


@dataclass(frozen=True, slots=True)
class Training:
    """What a trainer knows when a training begins, or is resumed."""

    optimizer: Optimizer
    model: nn.Module
    start: int
    """Steps of the trainer when the callback was first attached, which may be before a resume."""
    end: float
    """Steps of the trainer at the end; infinite if it does not know."""
    warmup_steps: int = 0
    """How many of them the trainer was asked to warm the learning rate up for."""
    others: tuple[Any, ...] = ()
    """Objects that a training step may change, besides the model: the trainer."""
    unknown: str = "limit the training by max_epochs or max_steps"
    """What to do if the trainer does not know its end, in words."""


class TrainerBinding:
    """What a callback has attached to the optimizer of a trainer.

    Args:
        training: The training.
        parts: A scheduler, or a monitor and a forecaster.
        layers: Whether to log the readings of each parameter.
        forecast: Whether to hand losses to the forecaster. A `Cooldown` always gets them.
        averaged: Whether to evaluate with averaged parameters.
    """

    def __init__(
        self,
        training: Training,
        *parts: Any,
        layers: bool = False,
        forecast: bool = False,
        averaged: bool = False,
    ) -> None:
        found = Sources.of(*parts)
        self.scheduler: Cooldown | FDRScheduler | None = found.scheduler
        self.monitor: Monitor | None = found.monitor
        self.forecaster: Forecaster | None = found.forecaster
        self._training = training
        self._parts = parts
        self._layers = layers
        self._forecast = forecast or isinstance(self.scheduler, Cooldown)
        self._averaged = averaged
        self._losses: list[Tensor] = []
        """The losses of the micro-batches since the last step."""
        self._replay: Callable[[], Any] | None = None
        """Evaluates the last one of them again."""
        self._can_replay = True
        params = training.model.parameters() if self._forecast else ()
        self._bystanders = Bystanders(params, _params(training.optimizer))
        if averaged:
            _warn_of_statistics(training.model)

    def add_loss(
        self, loss: Tensor, divided_by: int = 1, replay: Callable[[], Any] | None = None
    ) -> None:
        """Note the loss of a micro-batch. Nothing is waited for.

        Args:
            loss: The loss.
            divided_by: By which number of micro-batches the trainer has divided it.
            replay: Evaluates the loss again, without dividing it. It may change attributes of the
                training's model and `others`.
        """
        if self._forecast:
            self._losses.append(loss.detach() * divided_by if divided_by > 1 else loss.detach())
            self._replay = replay

    def end_step(self) -> Decision | None:
        """Hand over the mean of the losses since the last step.

        Returns:
            The decision of a `Cooldown` to begin the decay, if it was made here.
        """
        losses, self._losses = self._losses, []
        replay, self._replay = self._replay, None
        if not self._forecast:
            return None
        several = len(losses) > 1
        mean = torch.stack(losses).double().mean() if several else next(iter(losses), None)
        closure = None
        if mean is not None and replay is not None:
            closure = partial(self._evaluate_again, mean, losses[-1], replay)
        if not isinstance(self.scheduler, Cooldown):
            if self.forecaster is not None:
                self.forecaster.update(mean, closure)
            return None
        before = self.scheduler.last_decision
        self.scheduler.step(mean, closure)
        return self._acted(self.scheduler, before)

    def end_epoch(self) -> Decision | None:
        """Step an `FDRScheduler`. It does not decide twice if no optimizer step was made between.

        Returns:
            The decision to lower the learning rate, if it was made here.
        """
        if not isinstance(self.scheduler, FDRScheduler):
            return None
        before = self.scheduler.last_decision
        self.scheduler.step()
        return self._acted(self.scheduler, before)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a block in which the model has averaged parameters, if that was asked for."""
        if not self._averaged or self.forecaster is None:
            return nullcontext()
        return self.forecaster.averaged()

    def scalars(self) -> dict[str, float]:
        """Return the current numbers by name, for a logger."""
        return scalars(*self._parts, layers=self._layers)

    def describe(self, decision: Decision, step: int) -> str:
        """Return a decision to lower the learning rate as a sentence.

        Args:
            decision: The decision.
            step: The step, as the trainer counts.

        Returns:
            The sentence.
        """
        lrs = ", ".join(dict.fromkeys(f"{lr:g}" for lr in decision.lrs))
        decays = isinstance(self.scheduler, Cooldown)
        what = f"begins to fall from {lrs}" if decays else f"was lowered to {lrs}"
        return f"equilibrate: at step {step:,} the learning rate {what}: {decision.reason}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Every process must call it."""
        if self._forecast and self.forecaster is not None:
            self.forecaster.share_losses()
        states = {type(part).__name__: part.state_dict() for part in self._parts}
        return {"start": self._training.start, **states}

    def resume(self, saved: dict[str, Any] | None) -> None:
        """Restore a state, after that of the optimizer.

        Args:
            saved: What `state_dict` returned; None if the trainer has none.
        """
        if saved is None:
            if self._training.start:
                self._warn_of_missing_state()
            return
        for part in self._parts:
            if type(part).__name__ in saved:
                part.load_state_dict(saved[type(part).__name__])
        if isinstance(self.scheduler, Cooldown):  # creating it may have begun a warm-up
            write_lrs(self.scheduler.optimizer, list(map(float, self.scheduler.get_last_lr())))

    def _evaluate_again(
        self, loss: Tensor, last: Tensor, replay: Callable[[], Any]
    ) -> float | Tensor:
        """Return the loss of a step with the parameters of the moment.

        Only the last micro-batch is evaluated: the loss changes by as much as that of this one.

        Args:
            loss: The loss of the step.
            last: That of its last micro-batch.
            replay: Evaluates the last micro-batch again.

        Returns:
            The loss; nan if it cannot be evaluated. Every process must return something.
        """
        if not self._can_replay:
            return math.nan
        training = self._training
        try:
            with without_trace(
                [*training.others, *training.model.modules()], self._bystanders.moving()
            ):
                return loss - last + check_loss(replay())
        except Exception as error:  # any code of the user's
            self._can_replay = False
            warnings.warn(
                "the training step cannot be evaluated a second time "
                f"({type(error).__name__}: {error}), so forecasts rest on gradients alone, and "
                "are less certain",
                stacklevel=2,
            )
        return math.nan

    def _acted(self, scheduler: Cooldown | FDRScheduler, before: Decision) -> Decision | None:
        last = scheduler.last_decision
        return last if last.lowered and last != before else None

    def _warn_of_missing_state(self) -> None:
        words = "measurements begin here"
        if isinstance(self.scheduler, Cooldown):
            words += f", and so does the count of the {self.scheduler.total_steps} steps left"
        warnings.warn(
            f"the checkpoint of step {self._training.start} holds no state of equilibrate: {words}",
            stacklevel=4,
        )


@dataclass(eq=False)
class CooldownSettings:
    """The arguments of `CooldownCallback`."""

    warmup_steps: int = 0
    min_lr: float | Sequence[float] = 0.0
    evaluate_averaged: bool = False

    def attach(self, training: Training) -> TrainerBinding:
        """Return a `Cooldown` of a training.

        Raises:
            ValueError: If a number is out of range, or the length of the training is unknown.
        """
        if not math.isfinite(training.end):
            raise ValueError(
                "the trainer does not know how many optimizer steps it will make: "
                f"{training.unknown}"
            )
        steps = max(2, int(training.end) - training.start)  # a trial run may have one
        warmup = min(self.warmup_steps or training.warmup_steps, steps - 1)
        scheduler = Cooldown(training.optimizer, steps, warmup, self.min_lr, model=training.model)
        return TrainerBinding(training, scheduler, averaged=self.evaluate_averaged)


@dataclass(eq=False)
class FDRSettings:
    """The arguments of `FDRCallback`."""

    threshold: float = 0.01
    factor: float = 0.9
    rule: Rule | None = None
    min_lr: float | Sequence[float] = 0.0
    min_steps: int = 100

    def attach(self, training: Training) -> TrainerBinding:
        """Return an `FDRScheduler` of a training."""
        more = {"rule": self.rule, "min_lr": self.min_lr, "min_steps": self.min_steps}
        scheduler = FDRScheduler(training.optimizer, self.threshold, self.factor, **more)
        return TrainerBinding(training, scheduler)


@dataclass(eq=False)
class MonitorSettings:
    """The arguments of `MonitorCallback`."""

    layers: bool = False
    forecast: bool = False
    evaluate_averaged: bool = False

    def attach(self, training: Training) -> TrainerBinding:
        """Return a `Monitor` of a training, and a `Forecaster` if something needs one."""
        parts: list[Any] = [Monitor(training.optimizer, training.model if self.layers else None)]
        if self.forecast or self.evaluate_averaged:
            parts.append(Forecaster(training.optimizer, training.model))
        return TrainerBinding(
            training,
            *parts,
            layers=self.layers,
            forecast=self.forecast,
            averaged=self.evaluate_averaged,
        )


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _warn_of_statistics(model: nn.Module) -> None:
    """Warn if running statistics would not fit the parameters in evaluations."""
    if any(m.training and getattr(m, "track_running_stats", False) for m in model.modules()):
        warnings.warn(
            "evaluate_averaged=True, but the running statistics of BatchNorm do not fit averaged "
            "parameters, and evaluations will be wrong: evaluate yourself, inside `with "
            "forecaster.averaged(model)`, after torch.optim.swa_utils.update_bn",
            stacklevel=5,
        )
