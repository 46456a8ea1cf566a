"""A run as data: what is trained, how, for how long, and what is read.

Nothing here runs anything. The runs themselves are in `profiles`, what they show in `panels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from equilibrate.ensemble import Algorithm, Precision, Sampling


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
_LATER = ("sampling", "gradient_every", "precision")


@dataclass(frozen=True)
class Run:
    """One ensemble: every arm with every seed, all trained side by side.

    A seed fixes both the initial weights and the shuffling; with `start` it fixes the shuffling
    alone, and all replicas begin at the weights with which the first replica of that run ended.
    At each junction of `Stairs` the averages start afresh and, where `zero_velocity` says so, the
    velocity with them. `measures` says what is read at epoch ends beside the sides of FDR1: the
    "landscape" (full-batch gradient, O_FB) or the "performance" (full-batch loss, accuracies).

    `precision` is how a GPU forms products of single-precision numbers: in full, from operands
    rounded to TF32, or from operands in half precision, whose significand is TF32's. Sums are in
    single precision always, and a CPU ignores it.
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
    sampling: Sampling = "shuffled"
    gradient_every: int = 1
    """Epochs between full-batch gradients, each of which costs as much as an epoch of training."""
    precision: Precision = "fp32"
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
        junctions = {_junctions(schedule) for schedule in self.arms.values()}
        if self.measures == "landscape" and len(junctions) > 1:
            raise ValueError(
                f"arms of run {self.name!r} must change their learning rates together, since the "
                f"averages of its landscape start afresh in all of them, got {sorted(junctions)}"
            )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds of run {self.name!r} must be distinct, got {self.seeds}")
        if self.gradient_every < 1:
            raise ValueError(
                f"gradient_every of run {self.name!r} must be at least 1, got {self.gradient_every}"
            )
        for name, kinds in (("sampling", Sampling), ("precision", Precision)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(
                    f"{name} of run {self.name!r} must be one of {', '.join(get_args(kinds))}, "
                    f"got {getattr(self, name)!r}"
                )
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

    @property
    def whole_name(self) -> str:
        """The name of the run of which this may be a part."""
        return whole_name(self.name)

    def part(self, first: int, last: int) -> Run:
        """The seeds from `first` to `last` as a run of their own; `results.load` joins parts.

        It is named by the seeds that are there, so that the same ones have one name.

        >>> task = Task("mlp", "mlp", "mnist", "MLP on MNIST")
        >>> whole = Run("r", task, {"a": Stairs(((0.1, 1),))}, (0, 1, 2, 3), "performance")
        >>> part = whole.part(2, 3)
        >>> part.name, part.seeds, part.full_seeds
        ('r.2-3', (2, 3), 4)
        """
        seeds = tuple(seed for seed in self.seeds if first <= seed <= last)
        if not seeds:
            raise ValueError(
                f"run {self.name!r} has no seeds from {first} to {last}, only {self.seeds}"
            )
        return replace(self, name=f"{self.whole_name}.{seeds[0]}-{seeds[-1]}", seeds=seeds)

    def gradient_due(self, epoch: int) -> bool:
        """Whether the full-batch gradient is read after `epoch` epochs.

        That is every `gradient_every` epochs, and at the end of each tread, so that a tread has a
        reading however short it is.
        """
        ends = {end for schedule in self.arms.values() for end in _junctions(schedule)}
        return epoch % self.gradient_every == 0 or epoch in ends or epoch == self.epochs

    def shortened(self, epochs_scale: float, seeds: int | None) -> Run:
        """The same run with fewer epochs and seeds; it knows what the whole one has."""
        arms = {name: schedule.scaled(epochs_scale) for name, schedule in self.arms.items()}
        # Treads are rounded one by one, so that stairs may come out longer or shorter.
        stairs = [schedule.epochs for schedule in arms.values() if isinstance(schedule, Stairs)]
        return replace(
            self,
            arms={
                name: replace(schedule, epochs=stairs[0])
                if stairs and isinstance(schedule, Adaptive)
                else schedule
                for name, schedule in arms.items()
            },
            seeds=self.seeds[:seeds],
            full_epochs=self.full_epochs,
            full_seeds=self.full_seeds,
        )

    def to_config(self) -> dict[str, Any]:
        """Plain dicts and lists, for the head of a record.

        Settings that came later are left out at their defaults, so that a record made before them
        is still that of the same run.
        """
        config = {
            name: getattr(self, name)
            for name, field in self.__dataclass_fields__.items()
            if name not in _LATER or getattr(self, name) != field.default
        }
        return config | {
            "task": asdict(self.task),
            "arms": {name: asdict(schedule) for name, schedule in self.arms.items()},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Run:
        """The run whose `to_config` is in the head of a record; further entries are left out."""
        own = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        return cls(
            **own
            | {
                "task": Task(**own["task"]),
                "arms": {name: _schedule(fields) for name, fields in own["arms"].items()},
                "seeds": tuple(own["seeds"]),
            }
        )


def whole_name(name: str) -> str:
    """The name of the run of which one with this name may be a part.

    >>> whole_name("cnn-sequence.100-107"), whole_name("cnn-sequence")
    ('cnn-sequence', 'cnn-sequence')
    """
    return name.partition(".")[0]


def _junctions(schedule: Schedule) -> tuple[int, ...]:
    return schedule.junctions if isinstance(schedule, Stairs) else ()


def _schedule(fields: Mapping[str, Any]) -> Schedule:
    if "treads" in fields:
        return Stairs(tuple((lr, epochs) for lr, epochs in fields["treads"]))
    return Adaptive(**fields)
