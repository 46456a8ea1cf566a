"""A run as a value: what is trained, how, for how long, and what is measured.

The runs of the paper are in `profiles`, the figures drawn from them in `panels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from equilibrate_paper.ensemble import Algorithm, Precision, Sampling
from equilibrate_paper.protocol import schedules
from equilibrate_paper.protocol.schedules import Adaptive, PiecewiseConstant, Schedule


@dataclass(frozen=True)
class Task:
    """A network, its data set, and the settings common to all its runs."""

    name: str
    """Prefix of the names of its runs."""
    model: str
    """Name of the network in `models.ARCHITECTURES`."""
    data: str
    """Name of the data set in `datasets.NAMES`."""
    title: str
    """Title of its figures."""
    batch_size: int = 100
    """Number of examples in a batch."""
    weight_decay: float = 0.01
    """Coefficient λ of the L2 term."""


@dataclass(frozen=True)
class PaperRun:
    """An ensemble: every arm with every seed, all trained at the same time.

    Raises:
        ValueError: If the arms differ in length, if the arms of a run that measures the landscape
            change their learning rates at different epochs, or if seeds are missing or repeated.
    """

    name: str
    """Name of the run and of its files."""
    task: Task
    """What is trained."""
    arms: Mapping[str, Schedule]
    """The schedules to compare, by name."""
    seeds: tuple[int, ...]
    """Each seed determines the initial weights and the batches, with `start` only the batches."""
    measures: Literal["landscape", "performance"]
    """What is measured at the end of each epoch besides the two sides of FDR1: the full-batch
    gradient and O_FB ("landscape"), or full-batch loss and accuracies ("performance")."""
    algorithm: Algorithm = "sgd"
    """The optimizer."""
    momentum: float = 0.0
    """Momentum μ."""
    zero_velocity: bool = False
    """Whether the velocity is set to zero at each milestone, where the averages restart."""
    start: str | None = None
    """A run whose final weights, those of its first replica, are the initial weights of all
    replicas."""
    sampling: Sampling = "shuffled"
    """How batches are drawn."""
    gradient_every: int = 1
    """Epochs between full-batch gradients, each of which costs as much as an epoch of training."""
    precision: Precision = "fp32"
    """How a GPU multiplies: in full single precision, with operands rounded to TF32, or with
    operands in half precision. Sums are in single precision. A CPU ignores it."""
    record_every: int = 1
    """Epochs between recorded rows of a run that measures the landscape."""
    full_epochs: int = 0
    """Epochs in the protocol, if this run is shortened."""
    full_seeds: int = 0
    """Number of seeds in the protocol, if this run has fewer."""

    def __post_init__(self) -> None:
        lengths = {schedule.epochs for schedule in self.arms.values()}
        if len(lengths) != 1:
            raise ValueError(
                f"arms of run {self.name!r} must have the same number of epochs, got "
                f"{sorted(lengths)}"
            )
        milestones = {_milestones(schedule) for schedule in self.arms.values()}
        if self.measures == "landscape" and len(milestones) > 1:
            raise ValueError(
                f"arms of run {self.name!r} must change their learning rates at the same epochs, "
                f"because its averages restart in all arms together, got {sorted(milestones)}"
            )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds of run {self.name!r} must be distinct, got {self.seeds}")
        object.__setattr__(self, "arms", MappingProxyType(dict(self.arms)))
        object.__setattr__(self, "full_epochs", self.full_epochs or self.epochs)
        object.__setattr__(self, "full_seeds", self.full_seeds or len(self.seeds))

    @property
    def epochs(self) -> int:
        """Number of epochs of every arm."""
        return next(iter(self.arms.values())).epochs

    @property
    def replicas(self) -> tuple[tuple[str, int], ...]:
        """(arm, seed) of each replica, in the order of the ensemble."""
        return tuple((arm, seed) for arm in self.arms for seed in self.seeds)

    @property
    def records_norm(self) -> bool:
        """Whether |θ|² is recorded: in runs from new weights whose rows resolve each phase.

        Figure 1 shows these runs, and needs it for the L2 term of the loss. It is not a setting, so
        that records without it still equal those of the same run.
        """
        return self.measures == "landscape" and self.start is None and self.algorithm == "sgd"

    def gradient_due(self, epoch: int) -> bool:
        """Return whether the full-batch gradient is measured after an epoch.

        It is measured every `gradient_every` epochs and at the end of each phase, so that every
        phase has a measurement.

        Args:
            epoch: Number of completed epochs.
        """
        return epoch % self.gradient_every == 0 or self._ends_phase(epoch)

    def row_due(self, epoch: int) -> bool:
        """Return whether a row is recorded after an epoch.

        It is recorded every `record_every` epochs and at the end of each phase. Within the first
        epochs of a phase there are further rows.

        Args:
            epoch: Number of completed epochs.
        """
        return epoch % self.record_every == 0 or self._ends_phase(epoch)

    def _ends_phase(self, epoch: int) -> bool:
        ends = {end for schedule in self.arms.values() for end in _milestones(schedule)}
        return epoch in ends or epoch == self.epochs

    def shortened(self, epochs_scale: float, seeds: int | None) -> PaperRun:
        """Return the same run with fewer epochs and seeds.

        Args:
            epochs_scale: Factor of the number of epochs.
            seeds: Maximum number of seeds; None keeps all.
        """
        arms = {name: schedule.scaled(epochs_scale) for name, schedule in self.arms.items()}
        # Each phase is rounded, so the total may differ from that of a scaled adaptive schedule.
        lengths = [s.epochs for s in arms.values() if isinstance(s, PiecewiseConstant)]
        return replace(
            self,
            arms={
                name: replace(schedule, epochs=lengths[0])
                if lengths and isinstance(schedule, Adaptive)
                else schedule
                for name, schedule in arms.items()
            },
            seeds=self.seeds[:seeds],
            full_epochs=self.full_epochs,
            full_seeds=self.full_seeds,
        )

    def to_config(self) -> dict[str, Any]:
        """Return the run as plain dicts and lists, for the header of a record."""
        config = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return config | {
            "task": asdict(self.task),
            "arms": {name: asdict(schedule) for name, schedule in self.arms.items()},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PaperRun:
        """Return the run stored in the header of a record.

        Args:
            config: The result of `to_config`, possibly with further entries, which are ignored.
        """
        fields = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        return cls(
            **fields
            | {
                "task": Task(**fields["task"]),
                "arms": {n: schedules.from_config(arm) for n, arm in fields["arms"].items()},
                "seeds": tuple(fields["seeds"]),
            }
        )


def _milestones(schedule: Schedule) -> tuple[int, ...]:
    return schedule.milestones if isinstance(schedule, PiecewiseConstant) else ()
