"""Callbacks for the Trainer of Hugging Face. Needs `pip install 'equilibrate[transformers]'`.

Each attaches to the optimizer when the training begins and keeps its state in the `scheduler.pt` of
the trainer's checkpoints. What it reads goes through `trainer.log` to every tool of `report_to`, at
each step that the trainer logs, and whenever the learning rate is lowered; see
`equilibrate.scalars` for the names. During and after training `scheduler`, `monitor` and
`forecaster` are what the callback has attached, or None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from equilibrate.forecast.forecaster import Forecaster
from equilibrate.integrations._binding import (
    CooldownSettings,
    FDRSettings,
    MonitorSettings,
    TrainerBinding,
    Training,
)
from equilibrate.monitor.monitor import Monitor
from equilibrate.schedulers.cooldown import Cooldown
from equilibrate.schedulers.decision import Decision
from equilibrate.schedulers.fdr import FDRScheduler
from equilibrate.watching.rates import read_lrs

_CONSTANT = ("constant", "constant_with_warmup")
_PRINTING = (PrinterCallback, ProgressCallback)
"""Callbacks that print what is logged. A decision is printed as a sentence, and numbers are not."""


class TrainerHooks:
    """The hooks of a callback."""

    attach: Callable[[Training], TrainerBinding]
    """Creates what the callback is for."""

    scheduler: Cooldown | FDRScheduler | None = None
    """The scheduler; None before training, or if the callback has none."""
    monitor: Monitor | None = None
    """The monitor; None before training, or if the callback has none."""
    forecaster: Forecaster | None = None
    """The forecaster; None before training, or if the callback has none."""
    _binding: TrainerBinding
    _trainer: Trainer | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the optimizer, and restore the state of a checkpoint.

        Raises:
            ValueError: If the trainer changes the learning rate, which the callback is to set.
        """
        trainer = _find_trainer()
        saved = vars(trainer.lr_scheduler).pop(self._key, None)
        if saved is not None and saved["global_step"] != state.global_step:
            saved = None  # of an earlier checkpoint
        start = state.global_step if saved is None else saved["start"]
        warmup = args.get_warmup_steps(state.max_steps)
        training = Training(
            kwargs["optimizer"],
            kwargs["model"],
            start,
            state.max_steps,
            warmup,
            others=(trainer, trainer.accelerator),
        )
        self._binding = self.attach(training)
        self.scheduler, self.monitor = self._binding.scheduler, self._binding.monitor
        self.forecaster = self._binding.forecaster
        kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if self.scheduler is not None and kind not in _CONSTANT:
            raise ValueError(
                f"lr_scheduler_type is {kind!r}, which changes the learning rate at every step, "
                f"but {type(self).__name__} sets it: pass lr_scheduler_type='constant', or "
                "'constant_with_warmup' with warmup_steps, to TrainingArguments"
            )
        self._binding.resume(saved)
        self._logged = state.global_step
        if trainer is not self._trainer:  # else this is its second training
            self._trainer = trainer
            self._wrap(trainer)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Step the scheduler, log if it is time to, and prepare the state for a checkpoint."""
        decision = self._binding.end_step()
        if isinstance(self.scheduler, Cooldown):
            kwargs["lr_scheduler"]._last_lr = self.scheduler.get_last_lr()  # the trainer logs it
        # Not in on_epoch_end alone: a checkpoint after the last step must hold the decision.
        if float(state.epoch or 0.5).is_integer():
            decision = decision or self._end_epoch(kwargs["lr_scheduler"])
        self._tell(state, control, decision)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Step the scheduler at the end of an epoch, which may have been cut short, and log."""
        self._tell(state, control, self._end_epoch(kwargs["lr_scheduler"]))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prepare the state for a checkpoint that the trainer may write after an evaluation."""
        if args.save_strategy == "best" and self._trainer is not None:
            self._store(state)

    @property
    def _key(self) -> str:
        """The attribute of the trainer's scheduler that carries the state to scheduler.pt."""
        return f"equilibrate_{type(self).__name__}"

    def _wrap(self, trainer: Any) -> None:
        """Let a trainer hand over its losses, and evaluate with averaged parameters."""
        training_step, evaluate = trainer.training_step, trainer._evaluate

        def noting_training_step(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            if torch.is_grad_enabled():  # else another callback evaluates it again
                number = trainer.current_gradient_accumulation_steps
                replay = partial(_replay, trainer, number, training_step, *args, **kwargs)
                self._binding.add_loss(loss, number, replay)
            return loss

        def averaging_evaluate(*args: Any, **kwargs: Any) -> Any:
            with self._binding.averaged():
                return evaluate(*args, **kwargs)

        trainer.training_step = noting_training_step
        trainer._evaluate = averaging_evaluate  # not `evaluate`, which users call themselves

    def _end_epoch(self, lr_scheduler: Any) -> Decision | None:
        # The trainer's own scheduler sets base × λ(t) at every step: a lowering lowers its base.
        scheduler = self.scheduler
        before = [] if scheduler is None else read_lrs(scheduler.optimizer)
        decision = self._binding.end_epoch()
        if decision is not None:
            rates = zip(lr_scheduler.base_lrs, before, decision.lrs, strict=True)
            lr_scheduler.base_lrs = [
                new if base == old else base * new / old for base, old, new in rates
            ]
        return decision

    def _tell(
        self, state: TrainerState, control: TrainerControl, decision: Decision | None
    ) -> None:
        assert self._trainer is not None
        if decision is not None and state.is_world_process_zero:
            tqdm.write(self._binding.describe(decision, state.global_step))
        if state.global_step > self._logged and (decision is not None or control.should_log):
            self._logged = state.global_step
            should_log = control.should_log
            handler = self._trainer.callback_handler
            shown = handler.callbacks
            handler.callbacks = [c for c in shown if not isinstance(c, _PRINTING)]
            try:
                self._trainer.log(self._binding.scalars())
            finally:
                handler.callbacks = shown
            control.should_log = should_log  # any call of log() cancels the trainer's own
        if control.should_save:
            self._store(state)

    def _store(self, state: TrainerState) -> None:
        """Put the state where the trainer saves it. Its file is written on one process only."""
        assert self._trainer is not None
        saved = self._binding.state_dict() | {"global_step": state.global_step}
        setattr(self._trainer.lr_scheduler, self._key, saved)


def _replay(trainer: Any, number: int, training_step: Any, *args: Any, **kwargs: Any) -> Any:
    """Evaluate a training step again, without `backward`, and without a word to loggers.

    It replaces attributes of the trainer and of its accelerator: call it inside `without_trace`.

    Args:
        trainer: The trainer.
        number: Number of micro-batches in a step, by which the trainer divides the loss.
        training_step: Its training step.
        args: Arguments of the training step.
        kwargs: Arguments of the training step.

    Returns:
        The loss, not divided.
    """
    trainer.log = trainer.accelerator.backward = lambda *_, **__: None
    return training_step(*args, **kwargs) * number


def _find_trainer() -> Trainer:
    """Return the trainer that calls its callbacks.

    It hands them everything but itself, and the loss of a step is only to be had from its
    `training_step`. So this looks for it among the callers, once for each training.

    Raises:
        TypeError: If there is none.
    """
    frame = sys._getframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    raise TypeError(
        "the callback must be called by a transformers.Trainer: pass it to Trainer(callbacks=[…])"
    )


class CooldownCallback(CooldownSettings, TrainerHooks, TrainerCallback):
    """Keeps the learning rate constant, and decays it to zero when that pays: `Cooldown`.

    The decay ends with `trainer.train()`, which knows its number of steps. The loss is the one that
    the trainer trains with and logs, averaged over micro-batches. Every 50 steps `training_step` is
    called once more, without gradients and at averaged parameters, and nothing that it does then
    stays. It needs `lr_scheduler_type="constant"` or `"constant_with_warmup"`.

    Args:
        warmup_steps: Optimizer steps that warm the learning rate up, linearly; if 0, those of
            `TrainingArguments`.
        min_lr: Learning rate at the end, one number or one for each parameter group.
        evaluate_averaged: Whether the model has averaged parameters in the evaluations that the
            trainer makes during training, until the decay begins; see `Forecaster.averaged`.
            Checkpoints hold its own.

    Example:
        The training is 3 epochs long, so the cooldown ends with the third:

            arguments = TrainingArguments(num_train_epochs=3, lr_scheduler_type="constant")
            Trainer(model, arguments, train_dataset=data, callbacks=[CooldownCallback()])
    """


class FDRCallback(FDRSettings, TrainerHooks, TrainerCallback):
    """Lowers the learning rate at the end of an epoch if training has equilibrated: `FDRScheduler`.

    It needs `lr_scheduler_type="constant"` or `"constant_with_warmup"`.

    Args:
        threshold: The paper's X.
        factor: Factor by which the learning rate is multiplied, the paper's 1 − Y.
        rule: A rule instead of the threshold.
        min_lr: Lower bound on the learning rate, one number or one for each parameter group.
        min_steps: Optimizer steps that must lie in the averaging window.

    Example:
        The schedule of the paper:

            Trainer(model, arguments, train_dataset=data, callbacks=[FDRCallback(threshold=0.01)])
    """


class MonitorCallback(MonitorSettings, TrainerHooks, TrainerCallback):
    """Watches and logs, whatever the trainer does with the learning rate.

    Args:
        layers: Whether to log the readings of each parameter, too.
        forecast: Whether to forecast and log where a cooldown would end; see `Forecaster`.
        evaluate_averaged: Whether the model has averaged parameters in the evaluations that the
            trainer makes during training; see `Forecaster.averaged`. Checkpoints hold its own.

    Example:
        Keep the learning rate constant, and evaluate with averaged parameters:

            callbacks = [MonitorCallback(evaluate_averaged=True)]
            Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    """
