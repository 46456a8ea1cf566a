"""What a scheduler watches for its rule: a monitor, a forecaster, and the losses it is handed."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from equilibrate._engine.cooldown.loss_record import LossRecord, check_loss
from equilibrate.monitor import Monitor
from equilibrate.readings import Reading
from equilibrate.rules.base import needs_of

if TYPE_CHECKING:
    from equilibrate.forecast import Forecaster


def monitor_for(
    rule: Any,
    optimizer: Optimizer,
    given: Monitor | None,
    *,
    every: int | None,
    scale_invariant: bool | None,
) -> Monitor:
    """Return a monitor that records what a rule needs.

    Args:
        rule: The rule, or None.
        optimizer: The optimizer that it must watch.
        given: The monitor to check, if there is one.
        every: For a new one; the default if None.
        scale_invariant: For a new one; the default if None.

    Returns:
        The monitor.

    Raises:
        TypeError: If the one given is not a monitor.
        ValueError: If it watches another optimizer or does not record what the rule needs, or if
            arguments exclude each other.
    """
    needs = needs_of(rule)
    if given is None:
        settings = {"every": every, "scale_invariant": scale_invariant, "trace": "trace" in needs}
        return Monitor(optimizer, **{k: v for k, v in settings.items() if v is not None})
    if not isinstance(given, Monitor):
        raise TypeError(
            f"monitor must be an eq.Monitor, got {type(given).__name__}: pass eq.Monitor(optimizer)"
        )
    if given.optimizer is not optimizer:
        raise ValueError("monitor watches another optimizer: pass eq.Monitor(optimizer)")
    if every is not None:
        raise ValueError(
            "every and monitor exclude each other: pass eq.Monitor(optimizer, every=…)"
        )
    if scale_invariant is not None:
        raise ValueError(
            "scale_invariant and monitor exclude each other: pass "
            "eq.Monitor(optimizer, scale_invariant=…)"
        )
    if "trace" in needs and not given.traces:
        raise ValueError(
            f"{type(rule).__name__} needs a trace, which the monitor does not record: pass "
            "eq.Monitor(optimizer, trace=True)"
        )
    return given


def forecaster_for(
    rule: Any, optimizer: Optimizer, given: Forecaster | None, *, every: int | None
) -> Forecaster | None:
    """Return the forecaster that a rule needs.

    Args:
        rule: The rule, or None.
        optimizer: The optimizer that it must watch.
        given: The forecaster to check, if there is one.
        every: For a new one; the default if None.

    Returns:
        The forecaster, or None if the rule needs none.

    Raises:
        TypeError: If the one given is not a forecaster.
        ValueError: If it is of no use, or watches another optimizer.
    """
    if "forecasts" not in needs_of(rule):
        if given is not None:
            raise ValueError("forecaster is of no use: the rule needs no forecasts; leave it out")
        return None
    from equilibrate.forecast import Forecaster  # not loaded where it is not needed

    if given is None:
        return Forecaster(optimizer) if every is None else Forecaster(optimizer, every=every)
    if not isinstance(given, Forecaster):
        raise TypeError(
            f"forecaster must be an eq.Forecaster, got {type(given).__name__}: pass "
            "eq.Forecaster(optimizer)"
        )
    if given.optimizer is not optimizer:
        raise ValueError("forecaster watches another optimizer: pass eq.Forecaster(optimizer)")
    return given


class RuleInputs:
    """What a rule needs besides a plain reading: forecasts and losses.

    Args:
        rule: The first rule.
        forecaster: The forecaster, if it needs one.
    """

    def __init__(self, rule: Any, forecaster: Forecaster | None) -> None:
        self.provided = needs_of(rule)
        """What the first rule needs, and any other can have."""
        self._forecaster = forecaster
        self.losses = LossRecord() if "losses" in self.provided else None
        """The losses; None if they are not needed."""
        self._has_warned = False

    def add_loss(self, step: int, loss: Any) -> None:
        """Check a loss, and record it if losses are needed."""
        checked = check_loss(loss)
        if self.losses is not None:
            self.losses.add(step, checked)

    def share_losses(self) -> None:
        """Give all processes the same losses."""
        if self.losses is not None:
            self.losses.losses()

    def restart(self, step: int) -> None:
        """Forget all samples and losses up to a step."""
        if self._forecaster is not None:
            self._forecaster.reset()
        if self.losses is not None:
            self.losses.restart(step)

    def complete(self, reading: Reading, rule: Any) -> Reading:
        """Return a reading together with forecasts and losses; warn if the rule lacks losses."""
        if self._forecaster is not None:
            reading = replace(reading, forecasts=self._forecaster.forecasts())
        if self.losses is not None:
            reading = replace(reading, losses=(losses := self.losses.losses()))
            if "losses" in needs_of(rule) and not (losses.steps or self._has_warned):
                self._has_warned = True
                warnings.warn(
                    f"the rule {type(rule).__name__} needs the training loss, and step() was "
                    "called without it: call scheduler.step(loss)",
                    stacklevel=4,
                )
        return reading

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the forecaster and of the losses."""
        return {
            "forecaster": None if self._forecaster is None else self._forecaster.state_dict(),
            "losses": None if self.losses is None else self.losses.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        if self._forecaster is not None:
            self._forecaster.load_state_dict(state_dict["forecaster"])
        if self.losses is not None:
            self.losses.load_state_dict(state_dict["losses"])
