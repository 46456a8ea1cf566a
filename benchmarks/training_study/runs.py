"""Runs: a task, an arm and a seed become one record, written at the end of the run.

Arms that keep the learning rate constant for a while have the same training until then, for equal
seeds and learning rates. `execute_shared` makes this part once for all of them.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from equilibrate.record.provenance import environment
from training_study import data
from training_study.arms import ARMS, Context
from training_study.controls import DEFAULT, Cadence, Control
from training_study.shared import Shared
from training_study.tasks import TASKS, Loop, Network


@dataclass(frozen=True)
class Job:
    """Everything that determines a run."""

    stage: str
    """"tuning" or "final"."""
    task: str
    arm: str
    seed: int
    setting: Mapping[str, Any]
    """The learning rate `lr`, and the arm's own setting."""
    budget: int
    """Steps of budget 1."""
    steps: int
    """Steps to make."""
    interval: int
    """Steps between two evaluations."""
    trial: int = 0
    cadence: Cadence = DEFAULT

    @property
    def name(self) -> str:
        """Name of the record, without a suffix."""
        trial = f"-{self.trial}" if self.stage == "tuning" else ""
        return f"{self.stage}_{self.task}_{self.arm}_{self.seed}{trial}"

    @property
    def shared(self) -> tuple[str, str, int, float] | None:
        """What runs that begin alike have in common; None if the run is alone."""
        if ARMS[self.arm].alone:
            return None
        return self.stage, self.task, self.seed, self.setting["lr"]


@dataclass(frozen=True)
class Place:
    """Where and with what runs are made."""

    out: Path
    """Folder of the records."""
    file: Path | None = None
    """The data; None for random ones."""
    device: str | None = None
    """The GPU if there is one, by default."""
    tiny: bool = False
    """Whether models and batches are tiny."""

    @property
    def forks(self) -> Path:
        """Folder of the states from which runs that began with others are continued."""
        return self.out / "forks"

    def forked(self) -> dict[str, int]:
        """Return the runs that can be continued from a fork, and the steps they have made."""
        found = (path.stem.rsplit("@", 1) for path in self.forks.glob("*@*.pt"))
        return {name: int(step) for name, step in found}


def chance(task: str) -> float:
    """Return the metric of guessing, which a diverged run is charged with."""
    return math.log(256) if TASKS[task].is_text else 0.1


def execute(job: Job, place: Place) -> None:
    """Make a run, or continue it from a fork, and write its record, in one piece."""
    training = Training(job, place)
    control = training.control(job)
    step = place.forked().get(job.name)
    fork = None if step is None else place.forks / f"{job.name}@{step}.pt"
    if fork is not None:
        training.load(fork, control)
    training.run(control, job.steps)
    write(place.out / f"{job.name}.json", training.record(job, control, shared=step or 0))
    if fork is not None:
        fork.unlink()


def execute_shared(jobs: Sequence[Job], place: Place) -> None:
    """Make runs as far as they are the same, and write a record or a fork for each of them.

    Args:
        jobs: Runs with equal `shared`.
        place: Where to.
    """
    training = Training(jobs[0], place)
    controls = {job.name: training.control(job) for job in jobs}
    by_name = {job.name: job for job in jobs}

    def leave(name: str) -> None:
        training.save(place.forks / f"{name}@{training.loop.step}.pt", controls[name])
        controls.pop(name).detach()

    shared = Shared(training.loop.optimizer, controls, leave)
    for steps in sorted({job.steps for job in jobs}):
        training.run(shared, steps, unless=lambda: not controls)
        for name in [name for name in controls if by_name[name].steps == steps]:
            control = controls.pop(name)
            record = training.record(by_name[name], control, shared=training.loop.step)
            write(place.out / f"{name}.json", record)
            control.detach()


class Training:
    """A training with its evaluations so far.

    Args:
        job: The run. Of its arm only the optimizer is used.
        place: Where and with what to make it.
    """

    def __init__(self, job: Job, place: Place) -> None:
        self._began = time.perf_counter()
        self._device = prepare(place.device)
        self._job, self._task = job, TASKS[job.task]
        examples = data.load(self._task.data, place.file)
        network = _network(job.task, place.file, self._device, place.tiny)
        build = ARMS[job.arm].build(self._task, job.setting, self._device)
        self.loop = Loop(network, job.seed, build)
        self._cadence = job.cadence.fitted(network.epoch)
        split = examples.test if job.stage == "final" else examples.validation
        self._split, self._data = split.to(self._device), examples.fingerprint
        self._curve: list[list[float]] = []
        self._checked = self._evaluated = 0.0  # sums of losses at the last check and evaluation
        self._diverged = False

    def control(self, job: Job) -> Control:
        """Return what sets the learning rate in a run with this training."""
        options = {key: value for key, value in job.setting.items() if key != "lr"}
        context = Context(self.loop.optimizer, job.budget, job.steps, options, self._cadence)
        return ARMS[job.arm].make(context)

    def run(self, control: Control, steps: int, unless: Callable[[], bool] = lambda: False) -> None:
        """Train up to a number of steps, or until something is true before a step."""
        has_own = ARMS[self._job.arm].optimizer == "schedule-free"
        warm_up = 0 if has_own else self._task.warm_up
        group = self.loop.optimizer.param_groups[0]
        while self.loop.step < steps and not self._diverged:
            step = self.loop.step
            factor = control.factor(step)
            if unless():
                return
            scheduled = group["lr"]
            lr = scheduled * factor * min(1.0, (step + 1) / max(1, warm_up))
            group["lr"] = lr
            self.loop.train()
            group["lr"] = scheduled
            if self.loop.step % self._cadence.check == 0:
                self._check(control)
            if self.loop.step % self._job.interval == 0 and not self._diverged:
                self.evaluate(control, lr)

    def evaluate(self, control: Control, lr: float) -> None:
        """Add a row to the curve, with the learning rate of the last step."""
        metric, loss = self.loop.metric(self._split, control.averaged())
        total = self.loop.network.total.item()
        mean = (total - self._evaluated) / self._job.interval
        if not math.isfinite(metric):
            metric = chance(self._job.task)
        self._curve.append([self.loop.step, metric, loss, mean, lr])
        self._evaluated = total

    def record(self, job: Job, control: Control, shared: int = 0) -> dict[str, Any]:
        """Return the record of a run that ends now, of which some steps were shared."""
        where = environment()
        kept = ("equilibrate", "commit", "torch", "gpu", "started")
        return {
            **{key: value for key, value in asdict(job).items() if key != "cadence"},
            "curve": [[_short(x) for x in row] for row in [*self._curve, *self._missing(job)]],
            "acted": [[step, reason] for step, reason in control.acted[:200]],
            "diverged": self._diverged,
            "shared": shared,
            "seconds": round(time.perf_counter() - self._began, 3),
            "data": self._data,
            "where": {key: where[key] for key in kept},
        }

    def save(self, path: Path, control: Control) -> None:
        """Write all that a run is continued from, such that the file is complete if it exists."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        state = {"loop": self.loop.state_dict(), "control": control.state_dict()}
        own = {"curve": self._curve, "checked": self._checked, "evaluated": self._evaluated}
        torch.save(state | own, partial)
        partial.replace(path)

    def load(self, path: Path, control: Control) -> None:
        """Continue from what `save` wrote."""
        state = torch.load(path, map_location=self._device)
        self.loop.load_state_dict(state["loop"])
        control.load_state_dict(state["control"])
        self._curve = state["curve"]
        self._checked, self._evaluated = state["checked"], state["evaluated"]

    def _check(self, control: Control) -> None:
        total = self.loop.network.total.item()
        self._diverged = not math.isfinite(total)
        if not self._diverged:
            control.check(self.loop.step, (total - self._checked) / self._cadence.check)
            self._checked = total

    def _missing(self, job: Job) -> list[list[float]]:
        """Return rows for the evaluations that a diverged run did not reach."""
        return [
            [step * job.interval, chance(job.task), math.inf, math.inf, job.setting["lr"]]
            for step in range(len(self._curve) + 1, job.steps // job.interval + 1)
        ]


@cache
def _network(task: str, file: Path | None, device: str, tiny: bool) -> Network:
    """Return the network of a task, which is compiled once in a process."""
    return Network(TASKS[task], data.load(TASKS[task].data, file), device, tiny=tiny)


def write(path: Path, record: dict[str, Any] | list[float]) -> None:
    """Write a record such that the file is complete if it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    partial.replace(path)


def prepare(device: str | None = None) -> str:
    """Return the device to train on, and set one thread, and TF32 on a GPU."""
    torch.set_num_threads(1)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch._dynamo.config.recompile_limit = 64  # a compilation for each network, not eight
    return device


def _short(x: float) -> float:
    """Round for the record; JSON has no infinities."""
    return x if isinstance(x, int) else float(f"{x:.5g}") if math.isfinite(x) else 1e9
