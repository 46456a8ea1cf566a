"""Branch trainings at a constant learning rate, to see what forecasts of cooldowns are worth.

A run is trained at a constant learning rate (the trunk), watched by a `Forecaster` with a closure.
Recorded are the loss of every step and what the forecaster sampled. At some steps the trunk is
branched: the same parameters, optimizer state and batches go on with a learning rate that falls
linearly to zero over n steps.

At the end of a branch its loss is evaluated on the batches of the next steps, each before it is
trained on, as the losses of the trunk at these steps are. A second loss, on held-out examples, is
evaluated there and, averaged over 16 steps around a moment, on the trunk when the branch begins
and when it ends. With `--schedules` it is also branched with half and a tenth of the learning rate
and with twice the batch, and trained again from its beginning with a cosine to zero and with one to
a tenth; a `Cooldown` watches the trunk, too, which is branched where it begins.

`forecast_table.py` computes forecasts from the record, from what lies before each branch alone.
Every run is a process of its own and writes one file, again after each branch.

    python benchmarks/pack_data.py SOURCE data          # once: the data sets of images
    python benchmarks/forecast.py RUN ... --data data
        [--out DIR] [--workers 12] [--minutes 9] [--longest N] [--schedules] [--tiny]

A RUN is a task, a seed, and by what learning rate and batch size are multiplied: `gpt2:0`,
`vit:3:0.5`, `mlp:1:1:4`.
"""

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forecast_tasks import TASKS, ForecastTask, Training

import equilibrate as eq
from equilibrate.record.provenance import environment

OUT = Path(__file__).parent / "results" / "forecast"
PLACES = 16
"""Steps around a moment at which the trunk is evaluated on held-out examples."""
PARTS = 4
"""At each of them one in so many of the batches is evaluated."""
COSINES = {"cosine": 0.0, "cosine to a tenth": 0.1}
"""Share of the learning rate that is left at their end."""


class HeldOutLosses:
    """The loss of a trunk on held-out examples, around the ends of its branches.

    At each of several steps around a moment one part of the batches is evaluated, and each part at
    equally many steps.
    """

    def __init__(self, task: ForecastTask) -> None:
        half = task.around // PLACES
        self._places = [half * (2 * k + 1 - PLACES) for k in range(PLACES)]
        branches = [(t, n) for t, lengths in task.branches.items() for n in lengths]
        self._moments = sorted({moment for t, n in branches for moment in (t, t + n)})
        self._found: dict[int, list[float]] = {moment: [] for moment in self._moments}

    def at(self, training: Training) -> None:
        """Evaluate what is due at this step."""
        for moment in self._moments:
            if training.step - moment in self._places:
                place = self._places.index(training.step - moment)
                self._found[moment].append(training.held_out(PARTS, place))

    def around(self, moment: int) -> float | None:
        """Return the loss around a moment; None if not all of it is known."""
        losses = self._found.get(moment, [])
        return round(sum(losses) / PLACES, 6) if len(losses) == PLACES else None


def run(task: ForecastTask, name: str, seed: int, *, options: argparse.Namespace) -> None:
    """Train one run, branch it, and write its record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    examples = task.data(options.data, options.tiny).to(device)
    training = Training(task, examples, seed, tiny=options.tiny)
    initial = training.save()
    held_out = HeldOutLosses(task)
    record: dict[str, Any] = {
        "task": name,
        "title": task.title,
        "seed": seed,
        "settings": task.settings,
        "batch_size": training.batch_size,
        "warm_up": task.warm_up,
        "steps": task.steps,
        "examples": len(examples),
        "data": examples.fingerprint,
        "environment": environment(),
        "losses": [],
        "comparisons": [],
        "products": [],
        "branches": [],
        "schedules": {},
        "decays": {},
    }
    out = options.out / f"{options.run[0].replace(':', '-')}.json"
    forecaster = eq.Forecaster(training.optimizer, training.model)
    scheduler = None
    if options.schedules:
        scheduler = eq.Cooldown(training.optimizer, task.steps, task.warm_up, model=training.model)
    last = max(t + n for t, ns in task.branches.items() for n in ns)
    total = last + max(task.around, task.evaluated)
    losses = torch.zeros(total, device=device)  # many small tensors would break up the heap
    for step in range(total):
        held_out.at(training)
        if step == task.steps:
            with forecaster.averaged():
                record["schedules"]["averaged"] = round(training.held_out(), 6)
        if step in task.branches or step % 500 == 0:
            _note(record, forecaster, losses[:step], held_out)
            _write(out, record)
        if step in task.branches:
            kinds = [("cooldown", n) for n in task.branches[step]]
            if step == 2000 and options.schedules and not task.large:
                kinds += [(kind, task.branches[step][-1]) for kind in ("half", "tenth", "batch")]
            with returning(training, *filter(None, (forecaster, scheduler))) as saved:
                for kind, n in kinds:
                    record["branches"].append(branch(training, saved, kind, step, n))
            _write(out, record)
            if time.time() > options.deadline:
                return
        losses[step] = training.train(training.constant_lr())
        forecaster.update(losses[step], training.again)
        if scheduler is not None:
            scheduler.step(losses[step], training.again)
            if scheduler.is_decaying:
                record["decays"]["Cooldown"] = task.steps - training.step
                with returning(training, forecaster):
                    record["schedules"]["Cooldown"] = decay(training, scheduler)
                scheduler = None
    _note(record, forecaster, losses, held_out)
    record["finished"] = True
    _write(out, record)
    forecaster.detach()
    for name, floor in COSINES.items() if options.schedules else ():
        if time.time() < options.deadline:
            training.restore(initial)
            record["schedules"][name] = cosine(training, floor)
            _write(out, record)


@contextmanager
def returning(
    training: Training, *watchers: eq.Forecaster | eq.Cooldown
) -> Iterator[dict[str, Any]]:
    """Return after a block to where a training and what watches it are.

    Yields:
        The state of the training.
    """
    saved, states = training.save(), [copy.deepcopy(w.state_dict()) for w in watchers]
    yield saved
    training.restore(saved)
    for watcher, state in zip(watchers, states, strict=True):
        watcher.load_state_dict(state)


def branch(
    training: Training, saved: dict[str, Any], kind: str, step: int, n: int
) -> dict[str, Any]:
    """Return the losses at the end of a branch over n steps."""
    training.restore(saved)
    base = training.constant_lr()
    if kind == "cooldown":
        for k in range(n):
            training.train(base * (n - 1 - k) / n)
        coming = training.coming()
    else:
        factor = {"half": 0.5, "tenth": 0.1, "batch": 1.0}[kind]
        steps = range(n + training.task.evaluated)
        batches = 2 if kind == "batch" else 1
        coming = [training.train(base * factor, batches=batches) for _ in steps][n:]
        coming = torch.stack(coming).tolist()
    loss = training.held_out()
    print(f"{training.task.title}: step {step}, {kind} over {n} steps: {loss:.4f}", flush=True)
    made = {"step": step, "kind": kind, "horizon": n, "held_out": round(loss, 6)}
    return made | {"coming": [round(loss, 5) for loss in coming]}


def decay(training: Training, scheduler: eq.Cooldown) -> float:
    """Make the remaining steps of a training whose decay has begun; return its held-out loss."""
    begun = scheduler.last_decision
    print(f"{training.task.title}: step {begun.step}: {begun.reason}", flush=True)
    while training.step < training.task.steps:
        scheduler.step(training.train())
    return round(training.held_out(), 6)


def cosine(training: Training, floor: float) -> float:
    """Make all steps of a training with a cosine; return its held-out loss."""
    total, warm_up = training.task.steps, training.task.warm_up
    for step in range(total):
        share = max(0.0, (step + 1 - warm_up) / (total - warm_up))
        left = floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2
        training.train(training.constant_lr() * left)
    return round(training.held_out(), 6)


def _note(
    record: dict[str, Any],
    forecaster: eq.Forecaster,
    losses: torch.Tensor,
    held_out: HeldOutLosses,
) -> None:
    """Add to a record what is known of the trunk."""
    new = losses[len(record["losses"]) :].tolist()
    record["losses"] += [round(loss, 5) for loss in new]
    state = forecaster.state_dict()
    for name in ("comparisons", "products"):
        found = state[name]
        rows = zip(found["steps"], found["ages"], found["values"], strict=True)
        record[name] = [[t, round(age, 2), *pair] for t, age, pair in sorted(rows) if age < t]
    for made in record["branches"]:
        made["held_out_before"] = held_out.around(made["step"])
        made["held_out_staying"] = held_out.around(made["step"] + made["horizon"])


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record) + "\n")
    partial.replace(path)


def launch(jobs: list[list[str]], workers: int) -> int:
    """Run commands, some at a time; return how many of them failed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    waiting, running, failed = list(jobs), [], 0
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(subprocess.Popen(waiting.pop(0), env=environ))
        time.sleep(0.2)
        for process in [p for p in running if p.poll() is not None]:
            running.remove(process)
            failed += process.returncode != 0
    return failed


def changed(task: ForecastTask, lr: float, batch: float) -> ForecastTask:
    """Return a task with another learning rate and batch size."""
    settings = task.settings | {"lr": lr * task.settings["lr"]}
    return replace(task, settings=settings, batch_size=round(batch * task.batch_size))


def main(arguments: list[str] | None = None) -> None:
    """Run some runs, each in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+")
    parser.add_argument("--data", type=Path, help="folder with what pack_data.py wrote, and tokens")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=9, help="end with a branch after this")
    parser.add_argument(
        "--schedules", action="store_true", help="train with cosines and what else is compared, too"
    )
    parser.add_argument("--longest", type=int, help="leave out longer branches")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.deadline = options.deadline or time.time() + 60 * options.minutes
    if len(options.run) == 1:
        name, seed, *factors = options.run[0].split(":")
        lr, batch = (*factors, "1", "1")[:2]
        task = changed(TASKS[name], float(lr), float(batch))
        if options.tiny:
            small = {"steps": 300, "batch_size": 8, "warm_up": 0, "evaluated": 8}
            task = replace(task, branches={240: (24, 60), 270: (30,)}, around=48, **small)
        if longest := options.longest:
            kept = {t: tuple(n for n in ns if n <= longest) for t, ns in task.branches.items()}
            task = replace(task, branches={t: ns for t, ns in kept.items() if ns})
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high")
        run(task, name, int(seed), options=options)
        return
    shared = [f"--{name}" for name in ("tiny", "schedules") if getattr(options, name)]
    for name in ("data", "out", "deadline", "longest"):
        if (value := getattr(options, name)) is not None:
            shared += [f"--{name}", str(value)]
    jobs = [[sys.executable, __file__, job, *shared] for job in options.run]
    if failed := launch(jobs, options.workers):
        raise SystemExit(f"{failed} of {len(jobs)} runs failed")


if __name__ == "__main__":
    main()
