"""Everything that a monitor or a scheduler has to say at one moment, for records and loggers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import distributed

from equilibrate.decisions import Decision, Judgement
from equilibrate.layers import Layer, by_name
from equilibrate.monitor import Monitor
from equilibrate.readings import Reading
from equilibrate.rules import Threshold
from equilibrate.scheduler import FDRScheduler


@dataclass(frozen=True, slots=True)
class Observation:
    """What a monitor or a scheduler says at one moment."""

    step: int
    """Optimizer steps seen."""
    reading: Reading
    """The whole model, over the current window. Right after a lowering, which restarts the window,
    it is the reading that was judged."""
    lrs: tuple[float, ...]
    """Learning rate of each parameter group from now on; nan if a group has none."""
    decision: Decision | None = None
    """The scheduler's last decision; None for a monitor."""
    judgements: tuple[Judgement, ...] = ()
    """What the rule decided since the last observation."""
    forecasts: tuple[Any, ...] = ()
    """The forecasts of a `Forecaster`."""
    layers: dict[str, Layer] = field(default_factory=dict)
    """The layers by name, if requested; right after a lowering those before it."""

    @property
    def lowered(self) -> bool | None:
        """Whether the rate was lowered since the last observation; None without a scheduler."""
        return None if self.decision is None else any(made.lowered for made in self.judgements)


class Observer:
    """Takes observations of a monitor or a scheduler.

    Args:
        source: The monitor or the scheduler to observe.
        layers: Whether to read each parameter. The monitor must know their names.
        forecaster: Whose forecasts to include; by default that of the scheduler, if it has one.

    Raises:
        TypeError: If `source` is neither a monitor nor a scheduler.
    """

    def __init__(
        self,
        source: Monitor | FDRScheduler,
        *,
        layers: bool = False,
        forecaster: Any | None = None,
    ) -> None:
        scheduler = source if isinstance(source, FDRScheduler) else None
        monitor = source if scheduler is None else scheduler.monitor
        if not isinstance(monitor, Monitor):
            raise TypeError(
                f"source must be an eq.Monitor or an eq.FDRScheduler, got {type(source).__name__}"
            )
        if layers and scheduler is not None:
            scheduler.keep_layers = True
        self.monitor = monitor
        self.scheduler = scheduler
        self._layers = layers
        self._forecaster = forecaster or getattr(source, "forecaster", None)
        self._reported = scheduler.judgements[-1] if scheduler and scheduler.judgements else None

    def check(self) -> None:
        """Raise an error now, not after the first epoch, if layers have no names.

        If parameters are sharded, every process must call it.
        """
        if self._layers:
            self.monitor.parameter_readings()

    def observe(self) -> Observation:
        """Take an observation. It waits for the device.

        If parameters are sharded, every process must call it.

        Returns:
            The observation.
        """
        monitor, scheduler = self.monitor, self.scheduler
        decision = None if scheduler is None else scheduler.last_decision
        reading = monitor.reading()
        if decision is not None and not reading.count:
            reading = decision.reading
        forecasts = reading.forecasts  # those that were judged
        if forecasts is None and self._forecaster is not None:
            forecasts = self._forecaster.forecasts()
        return Observation(
            step=monitor.step,
            reading=reading,
            lrs=tuple(float(group.get("lr", "nan")) for group in monitor.optimizer.param_groups),
            decision=decision,
            judgements=self._new_judgements(),
            forecasts=tuple(forecasts or ()),
            layers=self._read_layers(),
        )

    def _read_layers(self) -> dict[str, Layer]:
        if not self._layers:
            return {}
        if self.scheduler is None:
            return by_name(self.monitor, Threshold())
        found = by_name(self.monitor, self.scheduler.rule)
        if not any(layer.reading.count for layer in found.values()):
            return self.scheduler.kept_layers or found
        return found

    def _new_judgements(self) -> tuple[Judgement, ...]:
        if self.scheduler is None:
            return ()
        new: list[Judgement] = []
        for judgement in reversed(self.scheduler.judgements):
            if judgement is self._reported:
                break
            new.append(judgement)
        self._reported = new[0] if new else self._reported
        return tuple(reversed(new))


def is_first_process() -> bool:
    """Return whether this process is rank 0, which alone writes records and logs."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0
