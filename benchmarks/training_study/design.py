"""What the study compared: its tasks, and its arms, which set the learning rate.

Names of rules are those of the commits that the records name. docs/training-study.md says what they
are called now.
"""

from dataclasses import dataclass

TRIALS = 8
"""Settings that were tried for each task and arm, on one seed."""


@dataclass(frozen=True)
class StudyTask:
    """What was trained."""

    title: str
    is_text: bool = False
    """Whether the metric is the loss of held-out text, and not the accuracy."""


TASKS = {
    "mlp": StudyTask("MLP, MNIST, SGD"),
    "cnn": StudyTask("The paper's CNN, CIFAR-10, SGD without momentum"),
    "resnet": StudyTask("ResNet-20 with BatchNorm, CIFAR-10, SGD"),
    "transformer": StudyTask("Byte-level transformer, Python sources, AdamW", is_text=True),
}


@dataclass(frozen=True)
class Arm:
    """What set the learning rate in a run."""

    title: str
    needs_budget: bool = False
    """Whether the number of steps had to be known in advance."""
    rule: bool = False
    """Whether it decided from what it saw when to lower the learning rate."""
    as_tuned: str | None = None
    """The arm whose setting was used instead of trials of its own."""
    cost: str = "bare"
    """Arms with equal words cost the same in a step."""


ARMS = {
    "constant": Arm("constant"),
    "step": Arm("step", needs_budget=True),
    "cosine": Arm("cosine", needs_budget=True),
    "wsd": Arm("warm-up, stable, decay", needs_budget=True),
    "plateau": Arm("ReduceLROnPlateau", rule=True),
    "paper-0.01": Arm("the paper's rule, X = 0.01, Y = 0.1", rule=True, cost="monitor"),
    "paper-0.1": Arm("the paper's rule, X = 0.1, Y = 0.3", rule=True, cost="monitor"),
    "stationary": Arm("`Stationary`", rule=True, cost="monitor with a trace"),
    "gain": Arm("`Gain`", rule=True, cost="forecaster"),
    "gain-known": Arm("`Gain(total_steps=…)`", needs_budget=True, rule=True, cost="forecaster"),
    "gain-start": Arm(
        "linear cooldown begun by `Gain(total_steps=…)`",
        needs_budget=True,
        rule=True,
        cost="forecaster",
    ),
    "gain-cooldown": Arm(
        "`Gain`, then a linear cooldown", needs_budget=True, rule=True, cost="forecaster"
    ),
    "forecast-cooldown": Arm(
        "cooldown when the forecast stops growing", rule=True, cost="forecaster"
    ),
    "sasa": Arm("SASA+", rule=True, cost="SASA+"),
    "averaged": Arm("constant, averaged by a `Forecaster`", cost="forecaster"),
    "schedule-free": Arm("schedule-free", cost="schedule-free"),
    "amsgrad": Arm("AMSGrad", cost="AMSGrad"),
    "cosine-half": Arm("cosine for half the budget", needs_budget=True, as_tuned="cosine"),
    "cosine-double": Arm("cosine for twice the budget", needs_budget=True, as_tuned="cosine"),
}
