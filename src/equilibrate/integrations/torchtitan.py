"""Schedulers for torchtitan, whose own container knows `LambdaLR` only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from torchtitan.components import lr_scheduler as titan
from torchtitan.tools.logging import logger

from equilibrate.integrations._attached import Attached, Plan, Settings

if TYPE_CHECKING:
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import LRScheduler as LRSchedulerConfig

_KEY = "equilibrate"


class FDRSchedulersContainer(titan.LRSchedulersContainer):
    """The warm-up of torchtitan, followed by an `FDRScheduler`.

    Create it with `build_lr_schedulers`. `schedulers` are the `LambdaLR` of the warm-up, from which
    torchtitan logs the learning rate; they follow each lowering.

    Args:
        warm_up: The container that torchtitan has built.
        optimizers: The optimizers. There must be one: pipeline stages and optimizers that step in
            the backward pass have several.
        start: Optimizer steps of the warm-up.
        plan: Settings of the scheduler.

    Raises:
        ValueError: If there is more than one optimizer.
    """

    def __init__(
        self,
        warm_up: titan.LRSchedulersContainer,
        optimizers: OptimizersContainer,
        *,
        start: int,
        plan: Plan,
    ) -> None:
        if len(optimizers) != 1:
            raise ValueError(
                f"there are {len(optimizers)} optimizers, each of which would decide by itself: "
                "train without pipeline parallelism and without early_step_in_backward"
            )
        self.schedulers = warm_up.schedulers
        [optimizer] = optimizers
        self._attached = Attached(
            optimizer, plan, start=start, named_parameters=(), others=self.schedulers
        )

    def step(self) -> None:
        """Step the warm-up, then decide whether to lower the learning rate."""
        super().step()
        decision = self._attached.advance(epoch_ended=False)
        if decision is not None and decision.lowered:
            logger.info(f"lr is {decision.lr:g} from here on: {decision.reason}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both, which does not depend on the sharding."""
        return {**super().state_dict(), _KEY: self._attached.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        state = dict(state_dict)
        self._attached.load_state_dict(state.pop(_KEY))
        super().load_state_dict(state)


def build_lr_schedulers(**settings: Unpack[Settings]) -> Callable[..., FDRSchedulersContainer]:
    """Return a `build_lr_schedulers_fn` for a `TrainSpec`.

    The learning rate is warmed up as `lr_scheduler.warmup_steps` says and then lowered whenever
    training has equilibrated, at least `min_steps` optimizer steps apart. The job must set
    `lr_scheduler.decay_ratio` to 0. The state is in torchtitan's checkpoints.

    Args:
        **settings: Arguments of `FDRScheduler`: `threshold`, `factor`, `rule`, `cooldown_end`,
            `min_lr`, `min_steps`, `every` and `scale_invariant`. `cooldown_end="end"` is the end
            of the training.

    Returns:
        The function, which raises a `ValueError` if the job asks for a decay.

    Raises:
        ValueError: If a setting is out of range, or the rule needs the loss, which torchtitan does
            not hand over.
    """
    plan = Plan(settings, interval="step")
    if "losses" in plan.needs:
        raise ValueError(
            f"the rule {type(settings.get('rule')).__name__} needs the loss, which torchtitan does "
            "not hand over: use another rule"
        )

    def build(
        optimizers: OptimizersContainer, lr_scheduler_config: LRSchedulerConfig, training_steps: int
    ) -> FDRSchedulersContainer:
        if lr_scheduler_config.decay_ratio != 0:
            raise ValueError(
                f"lr_scheduler.decay_ratio is {lr_scheduler_config.decay_ratio}, which changes the "
                "learning rate at every step: set it to 0"
            )
        warm_up = titan.build_lr_schedulers(optimizers, lr_scheduler_config, training_steps)
        start = int(lr_scheduler_config.warmup_steps)
        known = plan.with_length(lambda: training_steps)
        return FDRSchedulersContainer(warm_up, optimizers, start=start, plan=known)

    return build
