"""What sets the learning rate in a run: plans made in advance, and rules that look at the training.

The learning rate of a step is the group's `lr`, which rules change, times `Control.factor(step)`,
which plans change, times the task's warm-up.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

import equilibrate as eq
from training_study import sasa

FLOOR = 0.01
"""Share of the learning rate at which a cooldown of unknown budget ends."""


@dataclass(frozen=True)
class Cadence:
    """How often rules look, the same for all of them."""

    check: int = 100
    """Steps between two checks, and in the mean of the loss that rules get, if epochs are long."""
    every: int = 16
    """Monitors and forecasters measure every k-th step."""
    horizons: tuple[int, ...] | None = None
    """Horizons of forecasts; None for the default."""

    def fitted(self, epoch: int) -> "Cadence":
        """Return the cadence for epochs of a number of steps.

        Rules look at the ends of epochs, where the noise of reshuffled batches has cancelled,
        unless an epoch is longer than two checks.
        """
        return replace(self, check=epoch) if epoch <= 2 * self.check else self


DEFAULT = Cadence()


class Control:
    """Keeps the learning rate constant.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.acted: list[tuple[int, str]] = []
        """Steps after which the rule acted, and why."""

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter group, which rules change."""
        return [group["lr"] for group in self.optimizer.param_groups]

    @rates.setter
    def rates(self, rates: Sequence[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr

    def factor(self, step: int) -> float:
        """Return what the learning rate of a step is multiplied with."""
        return 1.0

    def check(self, step: int, loss: float) -> None:
        """Look at the training after a number of steps, given the mean loss since the last look."""

    def averaged(self) -> AbstractContextManager[None] | None:
        """Give the model averaged parameters for a block; None to evaluate those of training."""

    def detach(self) -> None:
        """Stop looking at the training."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that the control is continued from."""
        return {"acted": [list(row) for row in self.acted]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a state, after that of the optimizer has been loaded."""
        self.acted = [(step, reason) for step, reason in state["acted"]]


class Planned(Control):
    """Multiplies the learning rate by a function of the step. After the plan its last value stays.

    Args:
        optimizer: The optimizer.
        plan: The factor at a step.
        budget: Number of steps of the plan.
    """

    def __init__(self, optimizer: Optimizer, plan: Callable[[int], float], budget: int) -> None:
        super().__init__(optimizer)
        self._plan, self._budget = plan, budget

    def factor(self, step: int) -> float:
        """Return the plan's factor."""
        return self._plan(min(step, self._budget - 1))


def step_plan(budget: int, at: Sequence[float], drop: float) -> Callable[[int], float]:
    """Multiply by `drop` at shares of the budget."""
    return lambda step: drop ** sum(step >= round(share * budget) for share in at)


def cosine_plan(budget: int) -> Callable[[int], float]:
    """Half a cosine, from 1 to 0 after the last step."""
    return lambda step: 0.5 * (1 + math.cos(math.pi * step / budget))


def cooldown_plan(budget: int, share: float) -> Callable[[int], float]:
    """1, then linearly to 0 after the last step, over a share of the budget."""
    return lambda step: min(1.0, (budget - step) / (share * budget))


class Plateau(Control):
    """`ReduceLROnPlateau` on the training loss."""

    def __init__(self, optimizer: Optimizer, drop: float, patience: int) -> None:
        super().__init__(optimizer)
        self._scheduler = ReduceLROnPlateau(optimizer, factor=drop, patience=patience)

    def check(self, step: int, loss: float) -> None:
        """Hand the loss to the scheduler."""
        before = self.optimizer.param_groups[0]["lr"]
        self._scheduler.step(loss)
        if self.optimizer.param_groups[0]["lr"] < before:
            self.acted.append((step, "no lower loss"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the scheduler's."""
        return super().state_dict() | {"scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a state."""
        super().load_state_dict(state)
        self._scheduler.load_state_dict(state["scheduler"])


class Ruled(Control):
    """`FDRScheduler` with one of our rules, and a plan on top of it if there is one."""

    def __init__(
        self,
        optimizer: Optimizer,
        rule: eq.rules.Rule,
        drop: float,
        cadence: Cadence,
        plan: Planned | None = None,
    ) -> None:
        super().__init__(optimizer)
        needs_forecasts = isinstance(rule, eq.rules.Gain)
        self.scheduler = eq.FDRScheduler(
            optimizer,
            rule=rule,
            factor=drop,
            min_steps=cadence.check,
            monitor=eq.Monitor(
                optimizer, every=cadence.every, trace=isinstance(rule, eq.rules.Stationary)
            ),
            forecaster=eq.Forecaster(optimizer, cadence.horizons, cadence.every)
            if needs_forecasts
            else None,
        )
        self._plan = plan

    def factor(self, step: int) -> float:
        """Return the plan's factor."""
        return 1.0 if self._plan is None else self._plan.factor(step)

    def check(self, step: int, loss: float) -> None:
        """Let the scheduler decide."""
        self.scheduler.step(loss)
        if self.scheduler.last_decision.lowered:
            self.acted.append((step, self.scheduler.last_decision.reason))

    def detach(self) -> None:
        """Detach the scheduler with its monitor."""
        self.scheduler.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the scheduler's."""
        return super().state_dict() | {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a state."""
        super().load_state_dict(state)
        self.scheduler.load_state_dict(state["scheduler"])


class Sasa(Control):
    """SASA+, tested at every check."""

    def __init__(self, optimizer: Optimizer, drop: float, steps: int) -> None:
        super().__init__(optimizer)
        self._drop, self._recorder = drop, sasa.Recorder(optimizer, steps)
        self._stop_momentum = False

    def factor(self, step: int) -> float:
        """Stop the momentum after a drop, before the first step that the drop changes."""
        if self._stop_momentum:
            sasa.zero_momentum(self.optimizer)
            self._stop_momentum = False
        return 1.0

    def check(self, step: int, loss: float) -> None:
        """Divide the learning rate if the test says that the training is stationary."""
        samples = self._recorder.samples()
        first = not self.acted
        if len(samples) <= sasa.LEAST or not sasa.is_stationary(samples, first=first):
            return
        for group in self.optimizer.param_groups:
            group["lr"] *= self._drop
        self._stop_momentum = True
        self._recorder.reset()
        self.acted.append((step, f"{len(samples)} samples agree with zero"))

    def detach(self) -> None:
        """Stop recording."""
        self._recorder.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the samples."""
        own = {"recorder": self._recorder.state_dict(), "stop_momentum": self._stop_momentum}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a state."""
        super().load_state_dict(state)
        self._recorder.load_state_dict(state["recorder"])
        self._stop_momentum = state["stop_momentum"]


class Peak:
    """Tells when a series has stopped growing: its maximum is some values old.

    Args:
        patience: Values after the maximum, none of which exceeds it.
    """

    def __init__(self, patience: int) -> None:
        self._patience, self._best, self._since = patience, -math.inf, 0

    def add(self, value: float) -> bool:
        """Add a value; return whether the series has stopped growing."""
        if value > self._best:
            self._best, self._since = value, 0
        else:
            self._since += 1
        return self._since >= self._patience


class Cooldown(Control):
    """A cooldown that begins at a step that something decides during the training.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._start = math.inf

    @property
    def begun(self) -> bool:
        """Whether the cooldown has begun."""
        return self._start < math.inf

    def begin(self, step: int, reason: str) -> None:
        """Begin the cooldown at a step, after which nothing is decided any more."""
        self._start = step
        self.acted.append((step, reason))
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state once the cooldown has begun; before, it cannot be saved."""
        return super().state_dict() | {"start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the cooldown."""
        super().load_state_dict(state)
        self._start = state["start"]
        self.detach()


class ForecastCooldown(Cooldown):
    """One linear cooldown, which starts when the forecast of its gain stops growing.

    Its length is a share of the steps before it, and it ends at `FLOOR` of the learning rate, since
    the budget is not known.

    Args:
        optimizer: The optimizer.
        share: Length of the cooldown, as a share of the steps before it.
        cadence: How often to look.
        patience: Checks for which the forecast must not have exceeded its maximum.
    """

    def __init__(
        self, optimizer: Optimizer, share: float, cadence: Cadence, patience: int = 5
    ) -> None:
        super().__init__(optimizer)
        self._share = share
        self._forecaster = eq.Forecaster(optimizer, cadence.horizons, cadence.every)
        self._peak = Peak(patience)

    def factor(self, step: int) -> float:
        """Return 1 before the cooldown, `FLOOR` after it."""
        if step < self._start:
            return 1.0
        return max(FLOOR, 1 - (step - self._start + 1) / (self._share * self._start))

    def check(self, step: int, loss: float) -> None:
        """Read the forecast of the longest horizon, until the cooldown begins."""
        if self.begun:
            return
        forecast = self._forecaster.forecasts()[-1]
        if forecast.undefined is None and self._peak.add(forecast.gain.value):
            self.begin(step, f"the forecast stopped growing at {forecast.gain}")

    def detach(self) -> None:
        """Detach the forecaster."""
        self._forecaster.detach()


class RuledCooldown(Cooldown):
    """A linear cooldown to zero at the end of the budget, from the first decision of a rule on.

    This is `FDRScheduler(rule=…, cooldown_end=budget)`, called at every step, except that the rule
    gets one mean loss for each check, and that there is no cooldown without a decision. The
    scheduler was given one after the runs were made.

    Args:
        optimizer: The optimizer.
        rule: The rule.
        budget: Number of steps of the training.
        cadence: How often to look.
    """

    def __init__(
        self, optimizer: Optimizer, rule: eq.rules.Rule, budget: int, cadence: Cadence
    ) -> None:
        super().__init__(optimizer)
        self._rule = Ruled(optimizer, rule, 0.5, cadence)
        self._budget = budget

    def factor(self, step: int) -> float:
        """Return 1 before the cooldown, and 0 after it."""
        if step <= self._start:
            return 1.0
        return max(0.0, (self._budget - step) / (self._budget - self._start))

    def check(self, step: int, loss: float) -> None:
        """Ask the rule, until the cooldown begins. What it does to the learning rate is undone."""
        if self.begun or step >= self._budget:
            return
        rates = self.rates
        self._rule.check(step, loss)
        self.rates = rates
        for _, reason in self._rule.acted:
            self.begin(step, reason)

    def detach(self) -> None:
        """Detach the rule."""
        self._rule.detach()


class Averaged(Control):
    """A constant learning rate, and averages of the parameters that a forecaster keeps."""

    def __init__(self, optimizer: Optimizer, cadence: Cadence) -> None:
        super().__init__(optimizer)
        self._forecaster = eq.Forecaster(optimizer, cadence.horizons, cadence.every)

    def averaged(self) -> AbstractContextManager[None]:
        """Give the model the average of the longest horizon."""
        return self._forecaster.averaged()


class ScheduleFree(Control):
    """The averages that a schedule-free optimizer keeps, which it trains with as well."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        optimizer.train()
        self._optimizer = optimizer

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the average."""
        self._optimizer.eval()
        try:
            yield
        finally:
            self._optimizer.train()
