"""A callback for the Trainer of Hugging Face. Needs `pip install 'equilibrate[transformers]'`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.utils import logging

from equilibrate._arguments import check_steps
from equilibrate.forecast import Forecaster
from equilibrate.integrations._attached import (
    Attached,
    Plan,
    Settings,
    warn_of_missing_state,
    warn_of_statistics,
)
from equilibrate.monitor import Monitor
from equilibrate.scheduler import FDRScheduler

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

logger = logging.get_logger(__name__)

_KEY = "equilibrate"
"""The attribute of the trainer's scheduler that carries the state into scheduler.pt and back."""
_CONSTANT = ("constant", "constant_with_warmup")


class FDRCallback(TrainerCallback):
    """Lowers the learning rate whenever training has equilibrated, or only watches.

    It attaches an `FDRScheduler` to the optimizer of the trainer and logs what it reads through
    `trainer.log`, so that every tool of `report_to` receives it: at each step that the trainer
    logs, and whenever the learning rate is lowered. See `integrations.scalars` for the names.

    A schedule needs `lr_scheduler_type="constant"` or `"constant_with_warmup"`. Its first window
    begins after the warm-up.

    The state is saved in the `scheduler.pt` of each checkpoint that the trainer writes, and
    restored by `trainer.train(resume_from_checkpoint=…)`.

    Args:
        trainer: The trainer, for its log.
        schedule: Whether to lower the learning rate. If False it only watches.
        interval: When to decide: at the end of each epoch, or at any step. In both cases at least
            `min_steps` optimizer steps lie between decisions.
        start: Optimizer steps before the first window; the length of the trainer's warm-up if None.
        layers: Whether to log the readings of each parameter, too.
        horizons: Lengths of cooldowns, in steps, whose gain to forecast and log; see `Forecaster`.
        evaluate_averaged: Whether the model has averaged parameters in the evaluations that the
            trainer makes during training, until a cooldown begins; see `Forecaster.averaged`.
            Checkpoints hold its own.
        **settings: Arguments of `FDRScheduler`: `threshold`, `factor`, `rule`, `cooldown_end`,
            `min_lr`, `min_steps`, `every` and `scale_invariant`. A rule that needs the loss is
            given what `trainer.training_step` returns. `cooldown_end="end"` is the end of the
            training.

    Raises:
        TypeError: If `trainer` is not a trainer.
        ValueError: If a setting is out of range, or one of the scheduler's is given with
            `schedule=False`.

    Example:
        Lower the learning rate at the end of an epoch, or only watch:

            trainer.add_callback(FDRCallback(trainer, threshold=0.01, factor=0.9))
            trainer.add_callback(FDRCallback(trainer, schedule=False, layers=True))

        Keep the learning rate constant, and evaluate with averaged parameters:

            trainer.add_callback(FDRCallback(trainer, schedule=False, evaluate_averaged=True))
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        schedule: bool = True,
        interval: Literal["epoch", "step"] = "epoch",
        start: int | None = None,
        layers: bool = False,
        horizons: Sequence[int] | None = None,
        evaluate_averaged: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        if not hasattr(trainer, "add_callback"):
            raise TypeError(
                f"trainer must be the trainer, got {type(trainer).__name__}: pass "
                "FDRCallback(trainer) to trainer.add_callback"
            )
        self._trainer = trainer
        self._plan = Plan(settings, schedule, interval, layers, horizons, evaluate_averaged)
        self._start = None if start is None else check_steps("start", start, least=0)
        self._created_by_trainer = trainer.lr_scheduler is None
        self._attached: Attached | None = None
        self._logged = 0
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        """Our methods of the trainer, and what was there before, which is in its attributes."""

    @property
    def monitor(self) -> Monitor | None:
        """The monitor; None before training."""
        return None if self._attached is None else self._attached.monitor

    @property
    def scheduler(self) -> FDRScheduler | None:
        """The scheduler; None before training and with `schedule=False`."""
        return None if self._attached is None else self._attached.scheduler

    @property
    def forecaster(self) -> Forecaster | None:
        """The forecaster; None before training and if nothing needs one."""
        return None if self._attached is None else self._attached.forecaster

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Attach to the optimizer and restore the state of a checkpoint.

        Raises:
            ValueError: If a schedule is asked for and the trainer changes the learning rate itself,
                or the callback was created with another trainer.
        """
        if state is not self._trainer.state:
            raise ValueError(
                "trainer is not the one that the callback was added to: create another with "
                "trainer.add_callback(FDRCallback(trainer))"
            )
        kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if self._plan.schedule and self._created_by_trainer and kind not in _CONSTANT:
            raise ValueError(
                f"lr_scheduler_type is {kind!r}, which changes the learning rate at every step: "
                "set lr_scheduler_type='constant' or 'constant_with_warmup' in TrainingArguments, "
                "or pass schedule=False to watch only"
            )
        start = args.get_warmup_steps(state.max_steps) if self._start is None else self._start
        saved = vars(lr_scheduler).pop(_KEY, None)
        if saved is not None and saved["global_step"] != state.global_step:
            saved = None
        made = state.global_step if saved is None else 0  # the steps are counted from here on
        plan = self._plan.with_length(lambda: state.max_steps - made)
        self._attached = Attached(
            optimizer,
            plan,
            start=start,
            named_parameters=model.named_parameters(),
            others=[lr_scheduler],
        )
        self._logged = state.global_step
        self._leave()  # what a run that has crashed left there
        warn_of_statistics(self._plan, model)
        if self._attached.needs_loss:
            self._wrap("training_step", self._noting)
        if self._plan.evaluate_averaged:  # not `evaluate`, which users call themselves
            self._wrap("_evaluate", partial(self._averaging, model))
        if saved is not None:
            self._attached.load_state_dict(saved)
        elif state.global_step:
            warn_of_missing_state(plan, state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Decide and log if it is time to."""
        # Not in on_epoch_end: a checkpoint after the last step must hold the decision.
        self._advance(state, control, epoch_ended=float(state.epoch or 0.5).is_integer())

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Decide after an epoch that was cut short."""
        self._advance(state, control, epoch_ended=True)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Leave the trainer as it was."""
        self._leave()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Prepare the state for a checkpoint that the trainer may write after an evaluation."""
        if args.save_strategy == "best":
            self._store(state)

    def _noting(self, training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a training step that hands its loss over."""

        def noting(*args: Any, **kwargs: Any) -> Tensor:
            loss = training_step(*args, **kwargs)
            if self._attached is not None and self._is_used("training_step", noting):
                divided = self._trainer.current_gradient_accumulation_steps
                self._attached.add_loss(loss, divided)
            return loss

        return noting

    def _averaging(
        self, model: nn.Module, evaluate: Callable[..., dict[str, float]]
    ) -> Callable[..., dict[str, float]]:
        """Return an evaluation with averaged parameters."""

        def averaging(*args: Any, **kwargs: Any) -> dict[str, float]:
            if self._attached is None or not self._is_used("_evaluate", averaging):
                return evaluate(*args, **kwargs)
            with self._attached.averaged(model):
                return evaluate(*args, **kwargs)

        return averaging

    def _wrap(self, name: str, wrapped: Callable[[Any], Any]) -> None:
        """Replace a method of the trainer until the training ends."""
        method = getattr(self._trainer, name)
        self._wrapped[name] = (wrapped(method), vars(self._trainer).get(name))
        setattr(self._trainer, name, self._wrapped[name][0])

    def _is_used(self, name: str, ours: Callable[..., Any]) -> bool:
        """Return whether it is the one that was put there last.

        An earlier one can be left in the wrapper of another callback.
        """
        return name in self._wrapped and self._wrapped[name][0] is ours

    def _leave(self) -> None:
        """Give the trainer its own methods back, unless somebody else has replaced ours since."""
        for name, (ours, before) in self._wrapped.items():
            if vars(self._trainer).get(name) is not ours:
                continue
            if before is None:
                delattr(self._trainer, name)
            else:
                setattr(self._trainer, name, before)
        self._wrapped.clear()

    def _advance(self, state: TrainerState, control: TrainerControl, *, epoch_ended: bool) -> None:
        if self._attached is None:
            return
        decision = self._attached.advance(epoch_ended=epoch_ended)
        lowered = False
        if decision is not None and decision.lowered:
            lowered = True
            logger.info(
                f"lr is {decision.lr:g} from step {state.global_step} on: {decision.reason}"
            )
        if state.global_step > self._logged and (lowered or control.should_log):
            self._logged = state.global_step
            should_log = control.should_log
            self._trainer.log(self._attached.scalars())
            control.should_log = should_log  # any call of log() cancels the trainer's own
        if control.should_save:
            self._store(state)

    def _store(self, state: TrainerState) -> None:
        """Put the state where the trainer saves it. Its file is written on one process only."""
        if self._attached is not None:
            saved = self._attached.state_dict() | {"global_step": state.global_step}
            setattr(self._trainer.lr_scheduler, _KEY, saved)
