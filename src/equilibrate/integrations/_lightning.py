"""What the callbacks for the packages `lightning` and `pytorch_lightning` have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Unpack

import torch

from equilibrate._arguments import check_steps
from equilibrate.forecast import Forecaster
from equilibrate.integrations._attached import (
    Attached,
    Plan,
    Settings,
    named,
    warn_of_missing_state,
    warn_of_statistics,
)
from equilibrate.monitor import Monitor
from equilibrate.scheduler import FDRScheduler

Trainer = Any
"""The trainer of either package."""
LightningModule = Any
"""The module of either package."""


class LightningHooks:
    """The hooks of an `FDRCallback`, for the callback class of either package.

    The packages `lightning` and `pytorch_lightning` have the same classes twice, and a trainer of
    one may refuse callbacks of the other.
    """

    _inform: Callable[[str], None]
    """Shows a message, on the first process only."""
    _generate_state_key: Callable[..., str]
    """Lightning's own: the name of a callback's state."""

    def __init__(
        self,
        *,
        schedule: bool = True,
        interval: Literal["epoch", "step"] = "epoch",
        start: int = 0,
        layers: bool = False,
        horizons: Sequence[int] | None = None,
        evaluate_averaged: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        self._plan = Plan(settings, schedule, interval, layers, horizons, evaluate_averaged)
        self._start = check_steps("start", start, least=0)
        self._attached: list[Attached] = []
        self._validation = ExitStack()
        self._logged = 0
        self._restored: list[dict[str, Any]] = []

    @property
    def monitors(self) -> list[Monitor]:
        """The monitor of each optimizer; empty before training."""
        return [one.monitor for one in self._attached]

    @property
    def schedulers(self) -> list[FDRScheduler]:
        """The scheduler of each optimizer; empty before training and with `schedule=False`."""
        return [one.scheduler for one in self._attached if one.scheduler is not None]

    @property
    def forecasters(self) -> list[Forecaster]:
        """The forecaster of each optimizer; empty before training and if nothing needs one."""
        return [one.forecaster for one in self._attached if one.forecaster is not None]

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint."""
        return self._generate_state_key(schedule=self._plan.schedule)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all monitors and schedulers. Lightning calls it on every process."""
        return {"attached": [one.state_dict() for one in self._attached]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until training starts: Lightning restores callbacks before optimizers."""
        self._restored = state_dict["attached"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizers and restore the state of a checkpoint."""
        warn_of_statistics(self._plan, pl_module)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        restored, self._restored = self._restored, []

        def count() -> float:
            if not pl_module.automatic_optimization:
                return math.inf  # it makes the steps itself, and may make any number of them
            return trainer.estimated_stepping_batches - (0 if restored else trainer.global_step)

        plan = self._plan.with_length(count)
        self._attached = [
            Attached(
                optimizer,
                plan,
                start=self._start,
                named_parameters=pl_module.named_parameters(),
                others=[s for s in schedulers if s.optimizer is optimizer],
            )
            for optimizer in trainer.optimizers
        ]
        self._logged = trainer.global_step
        if restored:
            for one, state in zip(self._attached, restored, strict=True):
                one.load_state_dict(state)
        elif trainer.global_step:
            warn_of_missing_state(plan, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decide and log if it is time to."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            # Lightning has divided it, unless the module makes the steps itself.
            divided = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            for one in self._attached:
                one.add_loss(loss, divided)
        # Not in on_train_epoch_end: a checkpoint after the last batch must hold the decision.
        ended = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
        self._advance(trainer, epoch_ended=ended)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide after an epoch that was cut short."""
        self._advance(trainer, epoch_ended=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the model averaged parameters, if asked for, while it is trained."""
        if trainer.validating and trainer.state.fn == "fit":  # and it is not the sanity check
            for one in self._attached:
                self._validation.enter_context(one.averaged(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the model its own parameters back, before a checkpoint is written."""
        self._validation.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give the model its own parameters back."""
        self._validation.close()

    def _advance(self, trainer: Trainer, *, epoch_ended: bool) -> None:
        lowered = False
        for one in self._attached:
            decision = one.advance(epoch_ended=epoch_ended)
            if decision is not None and decision.lowered:
                lowered = True
                lrs = ", ".join(f"{lr:g}" for lr in decision.lrs)
                step = decision.reading.step
                self._inform(f"equilibrate: lr is {lrs} from step {step} on: {decision.reason}")
        if trainer.global_step > self._logged and (
            lowered or epoch_ended or _crossed(trainer, self._logged)
        ):
            self._logged = trainer.global_step
            self._log(trainer, named(self._attached))

    def _log(self, trainer: Trainer, values: dict[str, float]) -> None:
        exact = {"dtype": torch.float64, "device": "cpu"}
        metrics = {name: torch.tensor(value, **exact) for name, value in values.items()}
        trainer.callback_metrics.update(metrics)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step - 1)  # Lightning counts from 0


def _crossed(trainer: Trainer, since: int) -> bool:
    """Return whether a step at which the trainer logs has been reached since another one."""
    interval = trainer.log_every_n_steps
    return trainer.global_step // interval > since // interval
