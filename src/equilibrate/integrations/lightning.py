"""A callback for Lightning's Trainer. Needs `pip install 'equilibrate[lightning]'`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from equilibrate._engine.steps import check_steps
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

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class FDRCallback(Callback):
    """Lowers the learning rate whenever training has equilibrated, or only watches.

    It attaches an `FDRScheduler` to each optimizer, logs what it reads, and puts its state into the
    checkpoints of the trainer. `configure_optimizers` need not return a scheduler. One for the
    warm-up may stay; set `start` to its length.

    Numbers go to all loggers of the trainer every `log_every_n_steps` steps, at the end of each
    epoch and whenever the learning rate is lowered, and to `trainer.callback_metrics`. See
    `integrations.scalars` for their names. With several optimizers they begin with
    `equilibrate/optimizer_0/`, `equilibrate_layers/optimizer_0/` and so on.

    Args:
        schedule: Whether to lower the learning rate. If False it only watches.
        interval: When to decide: at the end of each epoch, or at any step. In both cases at least
            `min_steps` optimizer steps lie between decisions.
        start: Optimizer steps before the first window, such as the length of a warm-up.
        layers: Whether to log the readings of each parameter, too.
        horizons: Lengths of cooldowns, in steps, whose gain to forecast and log; see `Forecaster`.
        evaluate_averaged: Whether the model has averaged parameters during the validations of
            `trainer.fit`, until a cooldown begins; see `Forecaster.averaged`. Checkpoints hold its
            own, except those that are saved in the middle of a validation.
        **settings: Arguments of `FDRScheduler`: `threshold`, `factor`, `rule`, `cooldown_end`,
            `min_lr`, `min_steps`, `every` and `scale_invariant`. A rule that needs the loss is
            given what `training_step` returns. `cooldown_end="end"` is the end of `trainer.fit`.

    Raises:
        ValueError: If a setting is out of range, or one of the scheduler's is given with
            `schedule=False`.

    Example:
        Lower the learning rate at the end of an epoch, or only watch:

            Trainer(callbacks=[FDRCallback(threshold=0.01, factor=0.9)])
            Trainer(callbacks=[FDRCallback(schedule=False, layers=True)])

        Keep the learning rate constant, and validate with averaged parameters:

            Trainer(callbacks=[FDRCallback(schedule=False, evaluate_averaged=True)])
    """

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
        plan = self._plan.with_length(
            # A module that makes the steps itself may make any number of them.
            trainer.estimated_stepping_batches - (0 if restored else trainer.global_step)
            if pl_module.automatic_optimization
            else math.inf
        )
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
                rank_zero_info(f"equilibrate: lr is {lrs} from step {step} on: {decision.reason}")
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
    interval = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
    return trainer.global_step // interval > since // interval
