"""All runs, those of the paper and additions to it, at full size and at a quick size.

Settings that the paper leaves open are chosen here; docs/protocol-choices.md explains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from equilibrate_paper.ensemble import Precision, Sampling
from equilibrate_paper.protocol.panels import PANELS
from equilibrate_paper.protocol.run import PaperRun, Task
from equilibrate_paper.protocol.schedules import Adaptive, PiecewiseConstant


@dataclass(frozen=True)
class Profile:
    """All runs at one size."""

    name: str
    """Name of the profile."""
    runs: Mapping[str, PaperRun]
    """The runs by name, in the order in which they are executed."""
    threads: int | None = None
    """Number of CPU threads; None keeps PyTorch's default."""

    @property
    def panels(self) -> tuple[str, ...]:
        """The panels whose runs are all in this profile.

        >>> "B2b" in profile("paper").panels, "B2b" in profile("quick").panels
        (True, False)
        """
        return tuple(panel.id for panel in PANELS.values() if set(panel.runs) <= set(self.runs))

    def runs_for(self, panels: Iterable[str]) -> tuple[PaperRun, ...]:
        """Return the runs of some panels and the runs that these start from, in order.

        >>> [run.name for run in profile("paper").runs_for(["2a"])]
        ['mlp-initial', 'mlp-sequence']

        Args:
            panels: The panels to draw.
        """
        names = {name for panel in panels for name in PANELS[panel].runs + PANELS[panel].optional}
        names &= set(self.runs)
        names |= {start for name in names if (start := self.runs[name].start) is not None}
        return tuple(run for name, run in self.runs.items() if name in names)


@dataclass(frozen=True)
class _Size:
    """The size of all runs of one task."""

    task: Task
    initial_epochs: int
    preset_epochs: int
    """For each of the four learning rates."""
    sequence: PiecewiseConstant
    sequence_seeds: int
    unbiased: Mapping[str, PiecewiseConstant]
    unbiased_seeds: int
    grid_epochs: int
    momentum: float = 0.0
    """Outside section 3.3, in which the paper uses none."""
    precision: Precision = "fp32"
    """Of all runs except those that compare `precisions`."""
    precisions: tuple[Precision, ...] = ()
    precision_epochs: int = 0
    gradient_every: int = 1
    """In the sequence."""
    unbiased_gradient_every: int = 1
    comparison: PiecewiseConstant | None = None
    """Sequence in which reshuffled and independent batches are compared at equal length."""
    compared: tuple[Sampling, ...] = ()
    """How batches are drawn in that comparison, with a run for each."""
    compared_seeds: int = 0
    compared_precision: Precision = "fp32"
    compared_record_every: int = 1


def _runs(*sizes: _Size) -> Mapping[str, PaperRun]:
    # Short runs come first, so that the remaining time is known early; those that were added to
    # decide what the others left open come last.
    stages = (_initial, _scheduling, _grid, _precisions, _unbiased, _sequence, _comparison)
    runs = [run for stage in stages for size in sizes for run in stage(size)]
    return MappingProxyType({run.name: run for run in runs})


def _initial(size: _Size) -> Iterator[PaperRun]:
    yield PaperRun(
        name=f"{size.task.name}-initial",
        task=size.task,
        arms={"initial": PiecewiseConstant(((_FIRST_LR, size.initial_epochs),))},
        seeds=(0, 1, 2, 3),
        measures="landscape",
        momentum=size.momentum,
        precision=size.precision,
    )


def _scheduling(size: _Size) -> Iterator[PaperRun]:
    preset = PiecewiseConstant(
        tuple((lr, size.preset_epochs) for lr in (_FIRST_LR, 0.01, 0.001, 0.0001))
    )
    arms = {
        "preset": preset,
        "adaptive": Adaptive(_FIRST_LR, preset.epochs, threshold=0.01, factor=0.9),
    }
    if size.task.name == "cnn":
        arms["eager"] = Adaptive(_FIRST_LR, preset.epochs, threshold=0.1, factor=0.7)
    schedules = PaperRun(
        name=f"{size.task.name}-schedules",
        task=size.task,
        arms=arms,
        seeds=(0, 1, 2, 3),
        measures="performance",
        precision=size.precision,
    )
    yield schedules
    for algorithm in ("amsgrad", "adam"):
        yield replace(
            schedules,
            name=f"{size.task.name}-{algorithm}",
            arms={algorithm: PiecewiseConstant(((0.001, preset.epochs),))},
            algorithm=algorithm,
        )


def _grid(size: _Size) -> Iterator[PaperRun]:
    yield PaperRun(
        name=f"{size.task.name}-grid",
        task=size.task,
        arms={
            f"X={x:g}, Y={y:g}": Adaptive(_FIRST_LR, size.grid_epochs, threshold=x, factor=1 - y)
            for x in (0.003, 0.01, 0.03, 0.1)
            for y in (0.05, 0.1, 0.3, 0.5)
        },
        seeds=(0,),
        measures="performance",
        precision=size.precision,
    )


def _landscape(
    size: _Size, name: str, arms: Mapping[str, PiecewiseConstant], seeds: Iterable[int]
) -> PaperRun:
    # It starts from the end of the initial run, so its seeds differ: equal seeds would repeat the
    # batches of that run.
    return PaperRun(
        name=f"{size.task.name}-{name}",
        task=size.task,
        arms=arms,
        seeds=tuple(seeds),
        measures="landscape",
        momentum=size.momentum,
        zero_velocity=size.momentum > 0,
        start=f"{size.task.name}-initial",
        precision=size.precision,
    )


def _precisions(size: _Size) -> Iterator[PaperRun]:
    for precision in size.precisions:
        arms = {precision: PiecewiseConstant(((0.02, size.precision_epochs),))}
        yield replace(_landscape(size, precision, arms, range(300, 316)), precision=precision)


def _unbiased(size: _Size) -> Iterator[PaperRun]:
    seeds = range(200, 200 + size.unbiased_seeds)
    yield replace(
        _landscape(size, "unbiased", size.unbiased, seeds),
        sampling="independent",
        gradient_every=size.unbiased_gradient_every,
    )


def _sequence(size: _Size) -> Iterator[PaperRun]:
    seeds = range(100, 100 + size.sequence_seeds)
    yield replace(
        _landscape(size, "sequence", {"sequence": size.sequence}, seeds),
        gradient_every=size.gradient_every,
    )


def _comparison(size: _Size) -> Iterator[PaperRun]:
    for sampling in size.compared:
        assert size.comparison is not None
        name = {"shuffled": "reshuffled", "independent": "independent"}[sampling]
        seeds = range(400, 400 + size.compared_seeds)
        yield replace(
            _landscape(size, name, {"sequence": size.comparison}, seeds),
            sampling=sampling,
            gradient_every=size.gradient_every,
            precision=size.compared_precision,
            record_every=size.compared_record_every,
        )


def _each(lrs: Iterable[float], epochs: int) -> dict[str, PiecewiseConstant]:
    # One arm for each learning rate.
    return {f"η={lr:g}": PiecewiseConstant(((lr, epochs),)) for lr in lrs}


_FIRST_LR = 0.1
_MLP_SEQUENCE = PiecewiseConstant(
    ((0.05, 500), (0.02, 500), (0.01, 500), (0.005, 1000), (0.003, 1000))
)
_CNN_SEQUENCE = PiecewiseConstant(
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
)
# Only the three smallest learning rates are compared. The others bring the weights to a comparable
# state, for which a fifth of the epochs of the sequence is enough.
_MLP_COMPARISON = PiecewiseConstant(
    ((0.05, 100), (0.02, 100), (0.01, 300), (0.005, 300), (0.003, 600))
)
_QUICK_MLP_SEQUENCE = PiecewiseConstant(((0.05, 50), (0.03, 80), (0.02, 120), (0.01, 300)))
_QUICK_CNN_SEQUENCE = PiecewiseConstant(
    ((0.05, 40), (0.02, 40), (0.01, 50), (0.005, 60), (0.003, 80))
)

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "paper": Profile(
            "paper",
            _runs(
                _Size(
                    Task("mlp", "mlp", "mnist", "MLP on MNIST"),
                    initial_epochs=100,
                    preset_epochs=100,
                    sequence=_MLP_SEQUENCE,
                    sequence_seeds=4,
                    unbiased=_each((lr for lr, _ in _MLP_SEQUENCE.phases), 300),
                    unbiased_seeds=8,
                    grid_epochs=400,
                    precisions=("fp32", "tf32"),
                    precision_epochs=60,
                    comparison=_MLP_COMPARISON,
                    compared=("independent", "shuffled"),
                    compared_seeds=16,
                    compared_precision="tf32",
                ),
                _Size(
                    Task("cnn", "cnn", "cifar10", "CNN on CIFAR-10"),
                    initial_epochs=100,
                    preset_epochs=100,
                    sequence=_CNN_SEQUENCE,
                    sequence_seeds=16,
                    unbiased={"sequence": _CNN_SEQUENCE.scaled(0.2)},
                    unbiased_seeds=8,
                    grid_epochs=400,
                    momentum=0.9,
                    precision="fp16",
                    precisions=("fp32", "tf32", "fp16"),
                    precision_epochs=40,
                    gradient_every=5,
                    unbiased_gradient_every=2,
                    # The sequence itself is the run with reshuffled batches.
                    comparison=_CNN_SEQUENCE,
                    compared=("independent",),
                    compared_seeds=8,
                    compared_precision="fp16",
                    compared_record_every=5,
                ),
            ),
        ),
        "quick": Profile(
            "quick",
            # Five times the paper's decay: the relaxation time 1/(2ηλ) must fit into minutes.
            _runs(
                _Size(
                    Task("mlp", "digits-mlp", "digits", "MLP on digits", 25, weight_decay=0.05),
                    initial_epochs=80,
                    preset_epochs=60,
                    sequence=_QUICK_MLP_SEQUENCE,
                    sequence_seeds=4,
                    unbiased=_each((lr for lr, _ in _QUICK_MLP_SEQUENCE.phases), 150),
                    unbiased_seeds=3,
                    grid_epochs=120,
                ),
                _Size(
                    Task("cnn", "digits-cnn", "digits", "CNN on digits", 25, weight_decay=0.05),
                    initial_epochs=40,
                    preset_epochs=20,
                    sequence=_QUICK_CNN_SEQUENCE,
                    sequence_seeds=4,
                    unbiased={"sequence": _QUICK_CNN_SEQUENCE.scaled(0.4)},
                    unbiased_seeds=3,
                    grid_epochs=40,
                    momentum=0.9,
                ),
            ),
            # The digits are too small for several threads, and threads that wait for each other on
            # a busy machine are many times slower than one.
            threads=1,
        ),
    }
)


def profile(name: str, epochs_scale: float = 1.0, seeds: int | None = None) -> Profile:
    """Return the profile "quick" or "paper", optionally with fewer epochs and seeds.

    >>> profile("paper", epochs_scale=0.01).runs["mlp-initial"].epochs
    1

    Args:
        name: The name of the profile.
        epochs_scale: Fraction of the epochs of each run, in (0, 1].
        seeds: Maximum number of seeds of each run; None keeps all.

    Raises:
        ValueError: If the name is unknown or a number is out of range.
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
