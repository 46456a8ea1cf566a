"""What the callbacks for the packages `lightning` and `pytorch_lightning` have in common."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from equilibrate.forecast.forecaster import Forecaster
from equilibrate.integrations._binding import TrainerBinding, Training
from equilibrate.monitor.monitor import Monitor
from equilibrate.schedulers.cooldown import Cooldown
from equilibrate.schedulers.decision import Decision
from equilibrate.schedulers.fdr import FDRScheduler

_IN_THE_MODULE = (
    "return an eq.Cooldown or an eq.FDRScheduler for each optimizer from configure_optimizers, "
    "which training_step steps with the loss of that optimizer, or create an eq.Monitor for each; "
    "docs/trainers.md has an example"
)
"""What to do where a callback does not fit."""


class LightningHooks:
    """The hooks of a callback, for the callback class of either package.

    The packages `lightning` and `pytorch_lightning` have the same classes twice, and a trainer of
    one may refuse callbacks of the other.
    """

    attach: Callable[[Training], TrainerBinding]
    """Creates what the callback is for."""
    scheduler: Cooldown | FDRScheduler | None = None
    """The scheduler; None before training, or if the callback has none."""
    monitor: Monitor | None = None
    """The monitor; None before training, or if the callback has none."""
    forecaster: Forecaster | None = None
    """The forecaster; None before training, or if the callback has none."""
    _binding: TrainerBinding | None = None
    _saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Lightning calls it on every process."""
        return {} if self._binding is None else self._binding.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until training starts: Lightning restores callbacks before optimizers."""
        self._saved = state_dict or None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the optimizer, and restore the state of a checkpoint.

        Raises:
            ValueError: If there are several optimizers, or another scheduler sets learning rates.
        """
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"there are {len(trainer.optimizers)} optimizers, and {type(self).__name__} is for "
                f"one: remove it, and {_IN_THE_MODULE}"
            )
        saved, self._saved = self._saved, None
        start = trainer.global_step if saved is None else saved["start"]
        known = pl_module.automatic_optimization
        end = trainer.estimated_stepping_batches if known else math.inf
        training = Training(trainer.optimizers[0], pl_module, start, end, others=(trainer,))
        if not known:
            words = f"automatic_optimization is False. Remove the callback, and {_IN_THE_MODULE}"
            training = replace(training, unknown=words)
        binding = self.attach(training)
        self.scheduler, self.monitor = binding.scheduler, binding.monitor
        self.forecaster = binding.forecaster
        if self.scheduler is not None and trainer.lr_scheduler_configs:
            other = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ValueError(
                f"configure_optimizers returns {other}, but {type(self).__name__} sets learning "
                "rates: return the optimizer alone. CooldownCallback(warmup_steps=…) warms it up"
            )
        binding.resume(saved)
        self._binding = binding
        self._step = self._logged = trainer.global_step
        self._validation = ExitStack()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Step the scheduler, and log if it is time to."""
        assert self._binding is not None
        loss = _loss(outputs)
        if isinstance(loss, torch.Tensor):
            replay = partial(_replay, trainer, pl_module, batch, batch_idx)
            self._binding.add_loss(loss, trainer.accumulate_grad_batches, replay)
        if trainer.global_step > self._step:  # else gradients are accumulated
            self._step = trainer.global_step
            self._tell(trainer, self._binding.end_step())
        # Not in on_train_epoch_end: a checkpoint after the last batch must hold the decision.
        if trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches:
            self.on_train_epoch_end(trainer, pl_module)
        elif self._step // trainer.log_every_n_steps > self._logged // trainer.log_every_n_steps:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Step the scheduler at the end of an epoch, which may have been cut short, and log."""
        assert self._binding is not None
        self._tell(trainer, self._binding.end_epoch())
        self._log(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Give the model averaged parameters, if asked for, while it is trained."""
        if self._binding is not None and trainer.validating and trainer.state.fn == "fit":
            self._validation.enter_context(self._binding.averaged())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the model its own parameters back, before a checkpoint is written."""
        if self._binding is not None:
            self._validation.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the model its own parameters back."""
        self.on_validation_end(trainer, pl_module)

    def _tell(self, trainer: Any, decision: Decision | None) -> None:
        assert self._binding is not None
        if decision is not None:
            rank_zero_info(self._binding.describe(decision, trainer.global_step))
            self._log(trainer)

    def _log(self, trainer: Any) -> None:
        assert self._binding is not None
        if self._logged == self._step:
            return
        self._logged = self._step
        values = self._binding.scalars()
        exact = {"dtype": torch.float64, "device": "cpu"}
        metrics = {name: torch.tensor(value, **exact) for name, value in values.items()}
        for name in [name for name in trainer.callback_metrics if name.startswith("equilibrate")]:
            del trainer.callback_metrics[name]  # what is not known any more
        trainer.callback_metrics.update(metrics)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self._step - 1)  # Lightning counts from 0


class _Silence:
    """A logger of which anything may be asked, and that does nothing."""

    def __getattr__(self, name: str) -> _Silence:
        return self

    def __getitem__(self, name: Any) -> _Silence:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Silence:
        return self


def _loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _replay(trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> Any:
    """Evaluate a training step again, without a word to loggers.

    It replaces attributes of the trainer and of modules: call it inside `without_trace`.

    Returns:
        The loss.

    Raises:
        ValueError: If the training step does more than to evaluate a loss.
    """
    if not pl_module.automatic_optimization:
        raise ValueError("with manual optimization it makes optimizer steps")
    signature = inspect.signature(pl_module.training_step)
    if "dataloader_iter" in signature.parameters:
        raise ValueError("with dataloader_iter it takes other batches")
    trainer.loggers = [_Silence()]
    for module in pl_module.modules():
        if hasattr(module, "log_dict"):  # a LightningModule, of which there may be several
            module.log = _Silence()
    arguments = (batch, batch_idx) if _takes_two(signature) else (batch,)
    # It calls the module's, in the precision and through the wrapper that the trainer trains with.
    return _loss(trainer.strategy.training_step(*arguments))


def _takes_two(signature: inspect.Signature) -> bool:
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True
