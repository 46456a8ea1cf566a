"""One run: a task, an arm and a seed become one record, written at the end of the run."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from equilibrate.runlog.provenance import environment
from training_study import data
from training_study.arms import ARMS, Context
from training_study.controls import DEFAULT, Cadence
from training_study.tasks import TASKS, Loop


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


def chance(task: str) -> float:
    """Return the metric of guessing, which a diverged run is charged with."""
    return math.log(256) if TASKS[task].is_text else 0.1


def execute(
    job: Job, file: Path | None, out: Path, device: str | None = None, tiny: bool = False
) -> None:
    """Make a run and write its record, in one piece, to `out`."""
    write(out / f"{job.name}.json", run(job, file, device, tiny=tiny))


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record such that the file is complete if it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{time.time_ns()}.partial")
    partial.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    partial.replace(path)


def prepare(device: str | None = None) -> str:
    """Return the device to train on, and set one thread, and TF32 on a GPU."""
    torch.set_num_threads(1)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    return device


def run(
    job: Job, file: Path | None, device: str | None = None, *, tiny: bool = False
) -> dict[str, Any]:
    """Make a run and return its record."""
    began = time.perf_counter()
    device = prepare(device)
    task, arm = TASKS[job.task], ARMS[job.arm]
    examples = data.load(task.data, file)
    loop = Loop(task, examples, job.seed, arm.build(task, job.setting, device), device, tiny=tiny)
    options = {key: value for key, value in job.setting.items() if key != "lr"}
    cadence = job.cadence.fitted(loop.epoch)
    control = arm.make(Context(loop.optimizer, job.budget, job.steps, options, cadence))
    split = (examples.test if job.stage == "final" else examples.validation).to(device)
    warm_up = 0 if loop.schedule_free else task.warm_up  # it has its own
    group = loop.optimizer.param_groups[0]
    curve: list[list[float]] = []
    checked = evaluated = 0.0  # sums of losses at the last check and evaluation
    training, started, diverged = 0.0, _now(device), False
    while loop.step < job.steps:
        scheduled = group["lr"]
        step = loop.step
        lr = scheduled * control.factor(step)
        if step < warm_up:
            lr *= (step + 1) / warm_up
        group["lr"] = lr
        loop.train()
        group["lr"] = scheduled
        if loop.step % cadence.check == 0:
            total = loop.total.item()
            if not math.isfinite(total):
                diverged = True
                break
            control.check(loop.step, (total - checked) / cadence.check)
            checked = total
        if loop.step % job.interval == 0:
            training += _now(device) - started
            metric, test_loss = loop.metric(split)
            total = loop.total.item()
            mean = (total - evaluated) / job.interval
            curve.append([loop.step, metric, test_loss, mean, lr])
            evaluated = total
            started = _now(device)
    if diverged:
        for step in range(len(curve) + 1, job.steps // job.interval + 1):
            rate = job.setting["lr"]
            curve.append([step * job.interval, chance(job.task), math.inf, math.inf, rate])
    where = environment()
    return {
        **{key: value for key, value in asdict(job).items() if key != "cadence"},
        "curve": [[_short(x) for x in row] for row in curve],
        "acted": [[step, reason] for step, reason in control.acted[:200]],
        "diverged": diverged,
        "training_seconds": round(training, 3),
        "seconds": round(time.perf_counter() - began, 3),
        "data": examples.fingerprint,
        "where": {key: where[key] for key in ("equilibrate", "commit", "torch", "gpu", "started")},
    }


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _short(x: float) -> float:
    """Round for the record; JSON has no infinities."""
    return x if isinstance(x, int) else float(f"{x:.5g}") if math.isfinite(x) else 1e9
