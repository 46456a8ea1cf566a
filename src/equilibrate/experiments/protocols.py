"""The paper's runs as data: what is trained, how, for how long, and which panel shows it.

Nothing here runs anything. What the paper leaves open is chosen here and told in docs/choices.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

Algorithm = Literal["sgd", "adam", "amsgrad"]


@dataclass(frozen=True)
class Task:
    """A network, the data it learns, and the settings that hold for all its runs."""

    name: str
    model: str
    data: str
    title: str
    batch_size: int = 100
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Stairs:
    """Learning rates one after another, each for a number of epochs.

    >>> Stairs(((0.1, 2), (0.01, 3))).lr_at(2)
    0.01
    """

    treads: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        for lr, epochs in self.treads:
            if not lr > 0 or epochs < 1:
                raise ValueError(
                    f"treads must be (learning rate > 0, epochs ≥ 1), got ({lr}, {epochs})"
                )
        if not self.treads:
            raise ValueError("treads is empty: give at least one (learning rate, epochs)")

    @property
    def epochs(self) -> int:
        """Epochs in all."""
        return sum(epochs for _, epochs in self.treads)

    @property
    def junctions(self) -> tuple[int, ...]:
        """Epochs after which the learning rate changes."""
        ends, total = [], 0
        for _, epochs in self.treads[:-1]:
            total += epochs
            ends.append(total)
        return tuple(ends)

    def lr_at(self, epoch: int) -> float:
        """The learning rate of the epoch that begins after `epoch` whole ones."""
        return self.treads[sum(epoch >= end for end in self.junctions)][0]

    def scaled(self, factor: float) -> Stairs:
        """The same learning rates with `factor` times the epochs, each at least one."""
        return Stairs(tuple((lr, max(1, round(epochs * factor))) for lr, epochs in self.treads))


@dataclass(frozen=True)
class Adaptive:
    """The paper's section 3.3: where |L̄/R̄ − 1| < X at an epoch's end, η → (1 − Y)η.

    `tolerance` is X and `decrease` Y.
    """

    lr: float
    epochs: int
    tolerance: float
    decrease: float

    def scaled(self, factor: float) -> Adaptive:
        """The same rule for `factor` times the epochs, at least one."""
        return replace(self, epochs=max(1, round(self.epochs * factor)))


Schedule = Stairs | Adaptive


@dataclass(frozen=True)
class Run:
    """One ensemble: every arm with every seed, all trained side by side.

    A seed fixes both the initial weights and the shuffling; with `start` it fixes the shuffling
    alone, and all replicas begin at the weights with which the first replica of that run ended.
    At each junction of `Stairs` the averages start afresh and, where `zero_velocity` says so, the
    velocity with them. `measures` says what is read at epoch ends beside the sides of FDR1: the
    "landscape" (full-batch gradient, O_FB) or the "performance" (full-batch loss, accuracies).
    """

    name: str
    task: Task
    arms: Mapping[str, Schedule]
    seeds: tuple[int, ...]
    measures: Literal["landscape", "performance"]
    algorithm: Algorithm = "sgd"
    momentum: float = 0.0
    zero_velocity: bool = False
    start: str | None = None
    full_epochs: int = 0
    """Epochs of the whole protocol, where this run is a shortened one."""
    full_seeds: int = 0
    """Seeds of the whole protocol, where this run has fewer."""

    def __post_init__(self) -> None:
        lengths = {schedule.epochs for schedule in self.arms.values()}
        if len(lengths) != 1:
            raise ValueError(
                f"arms of run {self.name!r} must have equally many epochs, got {sorted(lengths)}"
            )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds of run {self.name!r} must be distinct, got {self.seeds}")
        object.__setattr__(self, "arms", MappingProxyType(dict(self.arms)))
        object.__setattr__(self, "full_epochs", self.full_epochs or self.epochs)
        object.__setattr__(self, "full_seeds", self.full_seeds or len(self.seeds))

    @property
    def epochs(self) -> int:
        """Epochs of every arm."""
        return next(iter(self.arms.values())).epochs

    @property
    def replicas(self) -> tuple[tuple[str, int], ...]:
        """(arm, seed) of each replica, in the order of the ensemble."""
        return tuple((arm, seed) for arm in self.arms for seed in self.seeds)

    def shortened(self, epochs_scale: float, seeds: int | None) -> Run:
        """The same run with fewer epochs and seeds; it knows what the whole one has."""
        arms = {name: schedule.scaled(epochs_scale) for name, schedule in self.arms.items()}
        # Treads are rounded one by one, so that stairs may come out longer or shorter.
        length = next((s.epochs for s in arms.values() if isinstance(s, Stairs)), None)
        return replace(
            self,
            arms={
                name: replace(schedule, epochs=length)
                if isinstance(schedule, Adaptive)
                else schedule
                for name, schedule in arms.items()
            },
            seeds=self.seeds[:seeds],
            full_epochs=self.full_epochs,
            full_seeds=self.full_seeds,
        )

    def to_config(self) -> dict[str, Any]:
        """Plain dicts and lists, for the head of a record."""
        config = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return config | {
            "task": asdict(self.task),
            "arms": {name: asdict(schedule) for name, schedule in self.arms.items()},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Run:
        """The run whose `to_config` is in the head of a record; further entries are left out."""
        own = {name: config[name] for name in cls.__dataclass_fields__}
        return cls(
            **own
            | {
                "task": Task(**own["task"]),
                "arms": {name: _schedule(fields) for name, fields in own["arms"].items()},
                "seeds": tuple(own["seeds"]),
            }
        )


def _schedule(fields: Mapping[str, Any]) -> Schedule:
    if "treads" in fields:
        return Stairs(tuple((lr, epochs) for lr, epochs in fields["treads"]))
    return Adaptive(**fields)


@dataclass(frozen=True)
class Panel:
    """One panel of a figure: the runs it is drawn from and its caption in our words."""

    id: str
    task: Literal["mlp", "cnn"]
    runs: tuple[str, ...]
    caption: str


_INITIAL = (
    "{title}: the approach to stationarity at η = 0.1. Above, the loss of each mini-batch (light) "
    "and its half-running average (dark); below, the two sides of FDR1, which meet once the norm "
    "of the weights has stopped drifting."
)
_SEQUENCE = (
    "{title}: the two sides of FDR1 after each lowering of the learning rate, left solid and right "
    "dotted, their averages started afresh each time. The smaller η, the later they meet."
)
_LANDSCAPE = (
    "{title}: the full-batch observable O_FB against the learning rate, mean and 95 % interval "
    "over seeds. The red line runs from the origin through the smallest η: in a harmonic landscape "
    "with constant noise all points would lie on it. An inset, if any, enlarges small η."
)
_SCHEDULES = (
    "{title}, SGD without momentum: preset schedule, adaptive schedule (X = 0.01, Y = 0.1) and "
    "AMSGrad. From above: learning rate, full-batch training loss, and accuracy on the training "
    "(solid) and test images (dashed)."
)
_ADAMS = (
    "{title}: AMSGrad beside Adam with their defaults. Above, the full-batch training loss; below, "
    "accuracy on the training (solid) and test images (dashed)."
)
_EAGER = (
    "{title}, initial seed {seed}: as in Figure 4, but with the eager rule X = 0.1, Y = 0.3, which "
    "lowers the learning rate sooner and by more."
)

PANELS: Mapping[str, Panel] = MappingProxyType(
    {
        panel.id: panel
        for panel in (
            Panel("1a", "mlp", ("mlp-initial",), _INITIAL),
            Panel("1b", "cnn", ("cnn-initial",), _INITIAL),
            Panel("2a", "mlp", ("mlp-sequence",), _SEQUENCE),
            Panel("2b", "cnn", ("cnn-sequence",), _SEQUENCE),
            Panel("3a", "mlp", ("mlp-sequence",), _LANDSCAPE),
            Panel("3b", "cnn", ("cnn-sequence",), _LANDSCAPE),
            Panel("4a", "mlp", ("mlp-schedules", "mlp-amsgrad"), _SCHEDULES),
            Panel("4b", "cnn", ("cnn-schedules", "cnn-amsgrad"), _SCHEDULES),
            Panel("S1a", "mlp", ("mlp-amsgrad", "mlp-adam"), _ADAMS),
            Panel("S1b", "cnn", ("cnn-amsgrad", "cnn-adam"), _ADAMS),
            *(
                Panel(f"S2{letter}", "cnn", ("cnn-schedules", "cnn-amsgrad"), _EAGER)
                for letter in "abcd"
            ),
        )
    }
)


@dataclass(frozen=True)
class Profile:
    """All runs of the paper at one size."""

    name: str
    runs: Mapping[str, Run]
    threads: int | None = None
    """Threads of torch on a CPU; None leaves its default."""

    def needed(self, panels: Iterable[str]) -> tuple[Run, ...]:
        """The runs that `panels` are drawn from and those that they start from, in order.

        >>> [run.name for run in profile("paper").needed(["3a"])]
        ['mlp-initial', 'mlp-sequence']
        """
        names = {name for panel in panels for name in PANELS[panel].runs}
        names |= {start for name in names if (start := self.runs[name].start) is not None}
        return tuple(run for name, run in self.runs.items() if name in names)


def _runs(
    mlp: Task,
    cnn: Task,
    *,
    initial: Mapping[str, Stairs],
    sequence: Mapping[str, Stairs],
    sequence_seeds: Mapping[str, int],
    preset: Mapping[str, Stairs],
) -> Mapping[str, Run]:
    """The paper's runs; the short ones first, so that the time they take is known early."""
    runs: list[Run] = []
    # The paper's momentum: none for the MLP, and for the CNN only outside section 3.3.
    momenta = {"mlp": 0.0, "cnn": 0.9}
    for task in (mlp, cnn):
        runs.append(
            Run(
                name=f"{task.name}-initial",
                task=task,
                arms={"initial": initial[task.name]},
                seeds=_FOUR_SEEDS,
                measures="landscape",
                momentum=momenta[task.name],
            )
        )
    for task in (mlp, cnn):
        lr, length = preset[task.name].treads[0][0], preset[task.name].epochs
        arms = {"preset": preset[task.name], "adaptive": Adaptive(lr, length, 0.01, 0.1)}
        if task is cnn:
            arms["eager"] = Adaptive(lr, length, 0.1, 0.3)
        schedules = Run(
            name=f"{task.name}-schedules",
            task=task,
            arms=arms,
            seeds=_FOUR_SEEDS,
            measures="performance",
        )
        runs.append(schedules)
        for algorithm in ("amsgrad", "adam"):
            runs.append(
                replace(
                    schedules,
                    name=f"{task.name}-{algorithm}",
                    arms={algorithm: Stairs(((0.001, length),))},
                    algorithm=algorithm,
                )
            )
    for task in (mlp, cnn):
        runs.append(
            Run(
                name=f"{task.name}-sequence",
                task=task,
                arms={"sequence": sequence[task.name]},
                seeds=tuple(range(100, 100 + sequence_seeds[task.name])),  # unlike the initial run
                measures="landscape",
                momentum=momenta[task.name],
                zero_velocity=task is cnn,
                start=f"{task.name}-initial",
            )
        )
    return MappingProxyType({run.name: run for run in runs})


_FOUR_SEEDS = (0, 1, 2, 3)


def _preset(epochs: int) -> Stairs:
    return Stairs(tuple((lr, epochs) for lr in (0.1, 0.01, 0.001, 0.0001)))


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "paper": Profile(
            "paper",
            _runs(
                Task("mlp", "mlp", "mnist", "MLP on MNIST"),
                Task("cnn", "cnn", "cifar10", "CNN on CIFAR-10"),
                initial={"mlp": Stairs(((0.1, 100),)), "cnn": Stairs(((0.1, 100),))},
                sequence={
                    "mlp": Stairs(
                        ((0.05, 500), (0.02, 500), (0.01, 500), (0.005, 1000), (0.003, 1000))
                    ),
                    "cnn": Stairs(
                        (
                            (0.05, 200),
                            (0.02, 200),
                            (0.01, 200),
                            (0.005, 400),
                            (0.003, 400),
                            (0.002, 400),
                            (0.0015, 400),
                            (0.001, 400),
                            (0.0005, 800),
                            (0.00025, 800),
                            (0.0001, 800),
                        )
                    ),
                },
                sequence_seeds={"mlp": 4, "cnn": 16},
                preset={"mlp": _preset(100), "cnn": _preset(100)},
            ),
        ),
        "quick": Profile(
            "quick",
            _runs(
                # Five times the paper's decay: the relaxation time 1/(2ηλ) must fit into minutes.
                Task("mlp", "digits-mlp", "digits", "MLP on digits", 25, weight_decay=0.05),
                Task("cnn", "digits-cnn", "digits", "CNN on digits", 25, weight_decay=0.05),
                initial={"mlp": Stairs(((0.1, 80),)), "cnn": Stairs(((0.1, 40),))},
                sequence={
                    "mlp": Stairs(((0.05, 50), (0.03, 80), (0.02, 120), (0.01, 300))),
                    "cnn": Stairs(((0.05, 40), (0.02, 40), (0.01, 50), (0.005, 60), (0.003, 80))),
                },
                sequence_seeds={"mlp": 4, "cnn": 4},
                preset={"mlp": _preset(60), "cnn": _preset(20)},
            ),
            # Digits are too small to share, and threads that wait for each other on a busy machine
            # are many times slower than one.
            threads=1,
        ),
    }
)


def profile(name: str, epochs_scale: float = 1.0, seeds: int | None = None) -> Profile:
    """The profile "quick" or "paper", shortened to a share of its epochs and to fewer seeds.

    >>> profile("paper", epochs_scale=0.01).runs["mlp-initial"].epochs
    1
    """
    if name not in PROFILES:
        raise ValueError(f"profile={name!r} is unknown; choose one of {', '.join(PROFILES)}")
    if not 0 < epochs_scale <= 1:
        raise ValueError(f"epochs_scale must lie in (0, 1], got {epochs_scale}")
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    whole = PROFILES[name]
    runs = {run.name: run.shortened(epochs_scale, seeds) for run in whole.runs.values()}
    return Profile(name, MappingProxyType(runs), whole.threads)
