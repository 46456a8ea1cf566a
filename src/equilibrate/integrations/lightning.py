"""Callbacks for Lightning's Trainer. Needs `pip install 'equilibrate[lightning]'`.

Each attaches to the optimizer when the training starts and keeps its state in the checkpoints of
the trainer. What it reads goes to `trainer.callback_metrics` and to all loggers, every
`log_every_n_steps` steps, at the end of each epoch, and whenever the learning rate is lowered; see
`equilibrate.scalars` for the names. During and after training `scheduler`, `monitor` and
`forecaster` are what the callback has attached, or None.
"""

from __future__ import annotations

from lightning.pytorch import Callback

from equilibrate.integrations._binding import CooldownSettings, FDRSettings, MonitorSettings
from equilibrate.integrations._lightning import LightningHooks


class CooldownCallback(CooldownSettings, LightningHooks, Callback):
    """Keeps the learning rate constant, and decays it to zero when that pays: `Cooldown`.

    The decay ends with `trainer.fit`, which knows its number of steps. The loss is the one that
    `training_step` returns, averaged over micro-batches. Every 50 steps it is called once more,
    without gradients and at averaged parameters, and nothing that it does then stays.
    `configure_optimizers` must return the optimizer alone.

    Args:
        warmup_steps: Optimizer steps that warm the learning rate up, linearly.
        min_lr: Learning rate at the end, one number or one for each parameter group.
        evaluate_averaged: Whether the model has averaged parameters in the validations of
            `trainer.fit`, until the decay begins; see `Forecaster.averaged`. Checkpoints hold its
            own, except those that are saved in the middle of a validation.

    Example:
        The training is 30 epochs long, so the cooldown ends with the thirtieth:

            Trainer(max_epochs=30, callbacks=[CooldownCallback()])
    """


class FDRCallback(FDRSettings, LightningHooks, Callback):
    """Lowers the learning rate at the end of an epoch if training has equilibrated: `FDRScheduler`.

    `configure_optimizers` must return the optimizer alone.

    Args:
        threshold: The paper's X.
        factor: Factor by which the learning rate is multiplied, the paper's 1 − Y.
        rule: A rule instead of the threshold.
        min_lr: Lower bound on the learning rate, one number or one for each parameter group.
        min_steps: Optimizer steps that must lie in the averaging window.

    Example:
        The schedule of the paper:

            Trainer(callbacks=[FDRCallback(threshold=0.01, factor=0.9)])
    """


class MonitorCallback(MonitorSettings, LightningHooks, Callback):
    """Watches and logs; the learning rate is yours.

    Args:
        layers: Whether to log the readings of each parameter, too.
        forecast: Whether to forecast and log where a cooldown would end; see `Forecaster`.
        evaluate_averaged: Whether the model has averaged parameters in the validations of
            `trainer.fit`; see `Forecaster.averaged`. Checkpoints hold its own, except those that
            are saved in the middle of a validation.

    Example:
        Keep the learning rate constant, and validate with averaged parameters:

            Trainer(callbacks=[MonitorCallback(evaluate_averaged=True)])
    """
