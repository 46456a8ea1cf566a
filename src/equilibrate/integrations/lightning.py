"""A callback for Lightning's Trainer. Needs `pip install 'equilibrate[lightning]'`."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from equilibrate.integrations._lightning import LightningHooks


class FDRCallback(LightningHooks, Callback):
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

    _inform = staticmethod(rank_zero_info)
