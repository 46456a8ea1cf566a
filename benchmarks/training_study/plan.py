"""How long a study takes, from the time of a step, and budgets that fit into a given time.

Times are upper bounds, since runs share what they have in common, and how much that is depends on
when rules act.
"""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from training_study.arms import ARMS
from training_study.records import Record
from training_study.runs import Job, Place, Training, write
from training_study.study import EVALUATIONS, Study
from training_study.tasks import TASKS
from training_study.workers import Work, work_off

OVERHEAD = 1.1
"""Factor for what arms cost beyond a bare step."""


@dataclass(frozen=True)
class Speed:
    """What a run of a task takes, in seconds."""

    step: float
    """A step of training."""
    start: float = 5.0
    """Starting the process, reading the data, the first steps."""
    evaluation: float = 0.05

    def run(self, job: Job, done: int = 0) -> float:
        """Return the time of a run, of which some steps have been made."""
        left = job.steps - done
        evaluations = left // job.interval
        return self.start + OVERHEAD * left * self.step + evaluations * self.evaluation


def assumed() -> dict[str, Speed]:
    """Return speeds without measurement."""
    return {name: Speed(task.step_ms / 1e3) for name, task in TASKS.items()}


def observed(speeds: Mapping[str, Speed], records: Iterable[Record]) -> dict[str, Speed]:
    """Return speeds that are corrected by what finished runs took."""
    factors: dict[str, list[float]] = {}
    for record in records:
        if record.shared:  # its time is not that of its own steps
            continue
        job = _job(record)
        factors.setdefault(record.task, []).append(record.seconds / speeds[record.task].run(job))
    return {
        name: speed
        if name not in factors
        else Speed(*(statistics.median(factors[name]) * x for x in asdict(speed).values()))
        for name, speed in speeds.items()
    }


def measure(tasks: Iterable[str], place: Place, workers: int, steps: int) -> dict[str, Speed]:
    """Return speeds with as many runs of the same task at a time as there are workers."""
    speeds = {}
    for task in tasks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            works = [
                Work(str(i), _time, (task, place, steps, out / f"{i}.json")) for i in range(workers)
            ]
            work_off(lambda works=works: works, workers, 120)
            found = [json.loads(path.read_text()) for path in out.glob("*.json")]
        if not found:
            raise SystemExit(f"no run of {task} could be timed: see the errors above")
        speeds[task] = Speed(*(statistics.median(row[i] for row in found) for i in range(3)))
    return speeds


def _time(task: str, place: Place, steps: int, out: Path) -> None:
    """Write the times of a step, a start and an evaluation."""
    job = Job("final", task, "constant", 0, {"lr": TASKS[task].rates[0]}, 30, steps, steps)
    began = time.perf_counter()
    training = Training(job, place)
    control = training.control(job)
    training.run(control, 10)  # the first steps load and compile
    started = time.perf_counter()
    training.run(control, steps)  # with an evaluation, which waits for all steps
    stepped = time.perf_counter()
    training.evaluate(control, 0.0)
    evaluation = time.perf_counter() - stepped
    step = max(0.0, stepped - started - evaluation) / (steps - 10)
    write(out, [step, started - began, evaluation])


def estimate(jobs: Iterable[Job], speeds: Mapping[str, Speed], workers: int) -> float:
    """Return the time that runs take, in seconds."""
    return sum(speeds[job.task].run(job) for job in jobs) / workers


def fit(study: Study, speeds: Mapping[str, Speed], workers: int, seconds: float) -> Study:
    """Return the study with all budgets scaled such that it takes a given time.

    Raises:
        ValueError: If starting the processes alone takes longer.
    """
    fixed = sum(
        speeds[job.task].start + job.steps // job.interval * speeds[job.task].evaluation
        for job in study.total()
    )
    steps = sum(OVERHEAD * job.steps * speeds[job.task].step for job in study.total())
    scale = (workers * seconds - fixed) / steps
    if scale <= 0:
        raise ValueError(
            f"{fixed / workers / 60:.1f} min go into starting and evaluating runs alone: allow "
            "more than that, or leave out tasks, arms or seeds"
        )
    budgets = {
        name: max(EVALUATIONS, math.floor(scale * budget / EVALUATIONS) * EVALUATIONS)
        for name, budget in study.budgets.items()
    }
    return replace(study, budgets=budgets)


def report(study: Study, speeds: Mapping[str, Speed], workers: int) -> str:
    """Return a table of what there is to run and how long it takes."""
    lines = [
        f"{'task':<12}{'budget':>8}{'trials':>8}{'runs':>6}{'Msteps':>8}{'ms/step':>9}"
        f"{'s/run':>7}{'min':>7}   ({workers} workers)"
    ]
    for task, budget in study.budgets.items():
        jobs = [job for job in study.total() if job.task == task]
        final = [job for job in jobs if job.stage == "final"]
        lines.append(
            f"{task:<12}{budget:>8}{len(jobs) - len(final):>8}{len(final):>6}"
            f"{sum(job.steps for job in jobs) / 1e6:>8.2f}{1e3 * speeds[task].step:>9.2f}"
            f"{speeds[task].run(final[0]):>7.0f}{estimate(jobs, speeds, workers) / 60:>7.1f}"
        )
    jobs = study.total()
    lines.append(
        f"{'all':<12}{len(jobs):>22} runs, {estimate(jobs, speeds, workers) / 60:.1f} min; arms: "
        f"{len(study.arms)}, of which {sum(ARMS[a].as_tuned is None for a in study.arms)} are tuned"
    )
    return "\n".join(lines)


def _job(record: Record) -> Job:
    return Job(
        record.stage, record.task, record.arm, record.seed, record.setting, record.budget,
        record.steps[-1], record.steps[0],
    )  # fmt: skip
