"""All runs of the paper, and ours beyond it, at full size and at a quick one.

What the paper leaves open is chosen here and told in docs/choices.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from equilibrate.ensemble import Precision
from equilibrate.paper.protocol.panels import PANELS
from equilibrate.paper.protocol.run import Adaptive, Run, Stairs, Task


@dataclass(frozen=True)
class Profile:
    """All runs of the paper, and ours beyond it, at one size."""

    name: str
    runs: Mapping[str, Run]
    threads: int | None = None
    """Threads of torch on a CPU; None leaves its default."""

    @property
    def panels(self) -> tuple[str, ...]:
        """The panels for which it has the runs.

        >>> "B2b" in profile("paper").panels, "B2b" in profile("quick").panels
        (True, False)
        """
        return tuple(panel.id for panel in PANELS.values() if set(panel.runs) <= set(self.runs))

    def with_part(self, part: str) -> Profile:
        """The same with one run cut down to some of its seeds, "RUN:FIRST-LAST".

        >>> profile("paper").with_part("cnn-sequence:100-107").runs["cnn-sequence"].name
        'cnn-sequence.100-107'
        """
        match = re.fullmatch(r"([\w-]+):(\d+)-(\d+)", part)
        if match is None or match[1] not in self.runs:
            raise ValueError(
                f"part={part!r} must be RUN:FIRST-LAST, such as cnn-sequence:100-107; the runs are "
                f"{', '.join(self.runs)}"
            )
        followers = [run.name for run in self.runs.values() if run.start == match[1]]
        if followers:
            raise ValueError(
                f"part={part!r} divides a run from whose end {', '.join(followers)} start: make "
                "it whole, without a part"
            )
        run = self.runs[match[1]].part(int(match[2]), int(match[3]))
        return replace(self, runs=MappingProxyType({**self.runs, match[1]: run}))

    def needed(self, panels: Iterable[str]) -> tuple[Run, ...]:
        """The runs that `panels` are drawn from and those that they start from, in order.

        >>> [run.name for run in profile("paper").needed(["2a"])]
        ['mlp-initial', 'mlp-sequence']
        """
        names = {name for panel in panels for name in PANELS[panel].runs + PANELS[panel].beside}
        names &= set(self.runs)
        names |= {start for name in names if (start := self.runs[name].start) is not None}
        return tuple(run for name, run in self.runs.items() if name in names)


@dataclass(frozen=True)
class _Size:
    """How much is run of one task.

    `precision` is that of all its runs but those that compare `precisions` with each other.
    """

    task: Task
    initial: int
    preset: int
    """Epochs of each of its four learning rates."""
    sequence: Stairs
    sequence_seeds: int
    unbiased: Mapping[str, Stairs]
    unbiased_seeds: int
    grid: int
    momentum: float = 0.0
    """Outside section 3.3, in which the paper has none."""
    precision: Precision = "fp32"
    precisions: tuple[Precision, ...] = ()
    compared: int = 0
    """Epochs of each precision's run."""
    gradient_every: int = 1
    """In the sequence."""
    unbiased_gradient_every: int = 1


def _runs(*sizes: _Size) -> Mapping[str, Run]:
    """All runs; the short ones first, so that the time they take is known early."""
    stages = (_initial, _scheduling, _grid, _precisions, _unbiased, _sequence)
    runs = [run for stage in stages for size in sizes for run in stage(size)]
    return MappingProxyType({run.name: run for run in runs})


def _initial(size: _Size) -> Iterator[Run]:
    yield Run(
        name=f"{size.task.name}-initial",
        task=size.task,
        arms={"initial": Stairs(((_FIRST_LR, size.initial),))},
        seeds=(0, 1, 2, 3),
        measures="landscape",
        momentum=size.momentum,
        precision=size.precision,
    )


def _scheduling(size: _Size) -> Iterator[Run]:
    preset = Stairs(tuple((lr, size.preset) for lr in (_FIRST_LR, 0.01, 0.001, 0.0001)))
    arms = {"preset": preset, "adaptive": Adaptive(_FIRST_LR, preset.epochs, 0.01, 0.1)}
    if size.task.name == "cnn":
        arms["eager"] = Adaptive(_FIRST_LR, preset.epochs, 0.1, 0.3)
    schedules = Run(
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
            arms={algorithm: Stairs(((0.001, preset.epochs),))},
            algorithm=algorithm,
        )


def _grid(size: _Size) -> Iterator[Run]:
    yield Run(
        name=f"{size.task.name}-grid",
        task=size.task,
        arms={
            f"X={tolerance:g}, Y={decrease:g}": Adaptive(_FIRST_LR, size.grid, tolerance, decrease)
            for tolerance in (0.003, 0.01, 0.03, 0.1)
            for decrease in (0.05, 0.1, 0.3, 0.5)
        },
        seeds=(0,),
        measures="performance",
        precision=size.precision,
    )


def _landscape(size: _Size, name: str, arms: Mapping[str, Stairs], seeds: Iterable[int]) -> Run:
    """From the end of the initial run on; seeds unlike its own, or its orders would come again."""
    return Run(
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


def _precisions(size: _Size) -> Iterator[Run]:
    for precision in size.precisions:
        arms = {precision: Stairs(((0.02, size.compared),))}
        yield replace(_landscape(size, precision, arms, range(300, 316)), precision=precision)


def _unbiased(size: _Size) -> Iterator[Run]:
    seeds = range(200, 200 + size.unbiased_seeds)
    yield replace(
        _landscape(size, "unbiased", size.unbiased, seeds),
        sampling="independent",
        gradient_every=size.unbiased_gradient_every,
    )


def _sequence(size: _Size) -> Iterator[Run]:
    seeds = range(100, 100 + size.sequence_seeds)
    yield replace(
        _landscape(size, "sequence", {"sequence": size.sequence}, seeds),
        gradient_every=size.gradient_every,
    )


def _each(lrs: Iterable[float], epochs: int) -> dict[str, Stairs]:
    """An arm for each learning rate, all from one beginning."""
    return {f"η={lr:g}": Stairs(((lr, epochs),)) for lr in lrs}


_FIRST_LR = 0.1
_MLP_SEQUENCE = Stairs(((0.05, 500), (0.02, 500), (0.01, 500), (0.005, 1000), (0.003, 1000)))
_CNN_SEQUENCE = Stairs(
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
_QUICK_MLP_SEQUENCE = Stairs(((0.05, 50), (0.03, 80), (0.02, 120), (0.01, 300)))
_QUICK_CNN_SEQUENCE = Stairs(((0.05, 40), (0.02, 40), (0.01, 50), (0.005, 60), (0.003, 80)))

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "paper": Profile(
            "paper",
            _runs(
                _Size(
                    Task("mlp", "mlp", "mnist", "MLP on MNIST"),
                    initial=100,
                    preset=100,
                    sequence=_MLP_SEQUENCE,
                    sequence_seeds=4,
                    unbiased=_each((lr for lr, _ in _MLP_SEQUENCE.treads), 300),
                    unbiased_seeds=8,
                    grid=400,
                    precisions=("fp32", "tf32"),
                    compared=60,
                ),
                _Size(
                    Task("cnn", "cnn", "cifar10", "CNN on CIFAR-10"),
                    initial=100,
                    preset=100,
                    sequence=_CNN_SEQUENCE,
                    sequence_seeds=16,
                    unbiased={"sequence": _CNN_SEQUENCE.scaled(0.2)},
                    unbiased_seeds=8,
                    grid=400,
                    momentum=0.9,
                    precision="fp16",
                    precisions=("fp32", "tf32", "fp16"),
                    compared=40,
                    gradient_every=5,
                    unbiased_gradient_every=2,
                ),
            ),
        ),
        "quick": Profile(
            "quick",
            # Five times the paper's decay: the relaxation time 1/(2ηλ) must fit into minutes.
            _runs(
                _Size(
                    Task("mlp", "digits-mlp", "digits", "MLP on digits", 25, weight_decay=0.05),
                    initial=80,
                    preset=60,
                    sequence=_QUICK_MLP_SEQUENCE,
                    sequence_seeds=4,
                    unbiased=_each((lr for lr, _ in _QUICK_MLP_SEQUENCE.treads), 150),
                    unbiased_seeds=3,
                    grid=120,
                ),
                _Size(
                    Task("cnn", "digits-cnn", "digits", "CNN on digits", 25, weight_decay=0.05),
                    initial=40,
                    preset=20,
                    sequence=_QUICK_CNN_SEQUENCE,
                    sequence_seeds=4,
                    unbiased={"sequence": _QUICK_CNN_SEQUENCE.scaled(0.4)},
                    unbiased_seeds=3,
                    grid=40,
                    momentum=0.9,
                ),
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
