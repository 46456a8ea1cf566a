"""The arms of the study: what sets the learning rate, with eight trials of settings for each.

An arm with a setting of its own is tried at four learning rates, with two values of the setting;
one without at eight learning rates. Arms that repeat another one for another budget use its
setting.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import equilibrate as eq
from training_study import controls
from training_study.controls import Cadence, Control, Planned
from training_study.tasks import Task

Options = Mapping[str, Any]
TRIALS = 8


@dataclass(frozen=True)
class Context:
    """What a control is made from."""

    optimizer: Optimizer
    budget: int
    """Steps of budget 1."""
    steps: int
    """Steps that the run makes."""
    options: Options
    cadence: Cadence


@dataclass(frozen=True)
class Arm:
    """What sets the learning rate in a run."""

    title: str
    make: Callable[[Context], Control]
    values: tuple[Options, Options] | None = None
    """Two values of the arm's own setting, if it has one."""
    needs_budget: bool = False
    """Whether the number of steps must be known in advance."""
    rule: bool = False
    """Whether it decides from what it sees when to lower the learning rate."""
    optimizer: str = "task"
    """The task's optimizer, "amsgrad" or "schedule-free"."""
    as_tuned: str | None = None
    """The arm whose setting is used instead of trials of its own."""
    cost: str = "bare"
    """Arms with equal words cost the same in a step."""
    package: str | None = None
    """A package that is needed beyond the library's own."""
    alone: bool = False
    """Whether it differs from a constant learning rate from the first step on."""
    length: float = 2.0
    """Budgets for which a reported run trains: until it ends, or its learning rate is zero."""

    def trials(self, task: Task) -> list[dict[str, Any]]:
        """Return the settings that are tried."""
        if self.optimizer == "amsgrad":
            rates = task.amsgrad_rates
        elif self.optimizer == "schedule-free":
            rates = tuple(task.schedule_free_factor * lr for lr in task.rates)
        else:
            rates = task.rates
        if self.values is None:
            return [{"lr": lr} for lr in rates]
        return [{"lr": lr, **value} for lr in task.coarse for value in self.values]

    def build(
        self, task: Task, setting: Options, device: str
    ) -> Callable[[list[nn.Parameter]], Optimizer]:
        """Return what builds the optimizer from the parameters."""
        settings = {"lr": setting["lr"], **task.settings}
        if self.optimizer != "schedule-free" and device == "cuda":
            settings["fused"] = True
        if self.optimizer == "task":
            return partial(task.optimizer, **settings)
        if self.optimizer == "amsgrad":
            settings.pop("momentum", None)
            kind = torch.optim.AdamW if task.is_text else torch.optim.Adam
            return partial(kind, amsgrad=True, **settings)
        import schedulefree  # pyright: ignore[reportMissingImports]  # optional

        settings.pop("momentum", None)
        kind = schedulefree.AdamWScheduleFree if task.is_text else schedulefree.SGDScheduleFree
        return partial(kind, warmup_steps=task.warm_up, **settings)


def _planned(plan: Callable[..., Callable[[int], float]], scale: float = 1.0) -> Any:
    """Return what makes a control from a plan for `scale` budgets."""

    def make(context: Context) -> Control:
        budget = round(scale * context.budget)
        return Planned(context.optimizer, plan(budget, **context.options), budget)

    return make


def _ruled(rule: Callable[[Context], eq.rules.Rule], drop: float | None = None) -> Any:
    def make(context: Context) -> Control:
        factor = drop if drop is not None else context.options["drop"]
        return controls.Ruled(context.optimizer, rule(context), factor, context.cadence)

    return make


def _gain_cooldown(context: Context) -> Control:
    plan = controls.cooldown_plan(context.budget, context.options["share"])
    planned = Planned(context.optimizer, plan, context.budget)
    return controls.Ruled(context.optimizer, eq.rules.Gain(), 0.5, context.cadence, planned)


_DROPS = ({"drop": 0.5}, {"drop": 0.2})
ARMS = {
    "constant": Arm("constant", lambda c: Control(c.optimizer)),
    "step": Arm(
        "step",
        _planned(controls.step_plan),
        ({"at": (0.5, 0.75), "drop": 0.1}, {"at": (0.33, 0.67), "drop": 0.2}),
        needs_budget=True,
    ),
    "cosine": Arm(
        "cosine", _planned(controls.cosine_plan), needs_budget=True, alone=True, length=1.0
    ),
    "wsd": Arm(
        "warm-up, stable, decay",
        _planned(controls.cooldown_plan),
        ({"share": 0.2}, {"share": 0.5}),
        needs_budget=True,
        length=1.0,
    ),
    "plateau": Arm(
        "ReduceLROnPlateau",
        lambda c: controls.Plateau(c.optimizer, **c.options),
        ({"drop": 0.5, "patience": 3}, {"drop": 0.1, "patience": 10}),
        rule=True,
    ),
    "paper-0.01": Arm(
        "the paper's rule, X = 0.01, Y = 0.1",
        _ruled(lambda _: eq.rules.Threshold(0.01), 0.9),
        rule=True,
        cost="monitor",
    ),
    "paper-0.1": Arm(
        "the paper's rule, X = 0.1, Y = 0.3",
        _ruled(lambda _: eq.rules.Threshold(0.1), 0.7),
        rule=True,
        cost="monitor",
    ),
    "stationary": Arm(
        "`Stationary`",
        _ruled(lambda _: eq.rules.Stationary()),
        _DROPS,
        rule=True,
        cost="monitor with a trace",
    ),
    "gain": Arm("`Gain`", _ruled(lambda _: eq.rules.Gain()), _DROPS, rule=True, cost="forecaster"),
    "gain-known": Arm(
        "`Gain(total_steps=…)`",
        _ruled(lambda c: eq.rules.Gain(total_steps=c.budget)),
        _DROPS,
        needs_budget=True,
        rule=True,
        cost="forecaster",
    ),
    "gain-start": Arm(
        "linear cooldown begun by `Gain(total_steps=…)`",
        lambda c: controls.RuledCooldown(
            c.optimizer, eq.rules.Gain(total_steps=c.budget), c.budget, c.cadence
        ),
        needs_budget=True,
        rule=True,
        cost="forecaster",
        length=1.0,
    ),
    "gain-cooldown": Arm(
        "`Gain`, then a linear cooldown",
        _gain_cooldown,
        ({"share": 0.2}, {"share": 0.5}),
        needs_budget=True,
        length=1.0,
        rule=True,
        cost="forecaster",
    ),
    "forecast-cooldown": Arm(
        "cooldown when the forecast stops growing",
        lambda c: controls.ForecastCooldown(c.optimizer, c.options["share"], c.cadence),
        ({"share": 0.25}, {"share": 1.0}),
        rule=True,
        cost="forecaster",
    ),
    "sasa": Arm(
        "SASA+",
        lambda c: controls.Sasa(c.optimizer, c.options["drop"], c.steps),
        ({"drop": 0.1}, {"drop": 0.5}),
        rule=True,
        cost="SASA+",
    ),
    "averaged": Arm(
        "constant, averaged by a `Forecaster`",
        lambda c: controls.Averaged(c.optimizer, c.cadence),
        alone=True,
        cost="forecaster",
    ),
    "schedule-free": Arm(
        "schedule-free",
        lambda c: controls.ScheduleFree(c.optimizer),
        optimizer="schedule-free",
        alone=True,
        cost="schedule-free",
        package="schedulefree",
    ),
    "amsgrad": Arm(
        "AMSGrad",
        lambda c: Control(c.optimizer),
        optimizer="amsgrad",
        alone=True,
        cost="AMSGrad",
    ),
    "cosine-half": Arm(
        "cosine for half the budget",
        _planned(controls.cosine_plan, 0.5),
        needs_budget=True,
        alone=True,
        length=0.5,
        as_tuned="cosine",
    ),
    "cosine-double": Arm(
        "cosine for twice the budget",
        _planned(controls.cosine_plan, 2.0),
        needs_budget=True,
        alone=True,
        as_tuned="cosine",
    ),
}


def available(names: list[str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the arms that can be run here, and why others cannot."""
    missing = {
        name: f"the package {arm.package} is not installed"
        for name, arm in ARMS.items()
        if arm.package and not importlib.util.find_spec(arm.package)
    }
    chosen = list(ARMS) if names is None else names
    return [name for name in chosen if name not in missing], missing
