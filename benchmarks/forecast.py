"""Branch trainings at a constant learning rate, to see what forecasts of cooldowns are worth.

A run is trained at a constant learning rate (the trunk). Recorded are the loss of every step and,
every 50 steps, the loss of the next batch at the parameters and at running means of them, of which
the last has a half-life of 5 % of the steps so far. At some steps the trunk is branched: the same
parameters, optimizer state and batches go on with a learning rate that falls linearly to zero over
n steps; at one step also halved, lowered to a tenth, or with twice the batch. The loss on batches
that come after the n steps is evaluated around the beginning, around the end of n more steps of the
trunk, and at the end of the branch. With `--schedules` the run is then trained again from its
beginning, with a cosine to zero and with one to a tenth.

The trunk knows nothing of forecasts: `forecast_table.py` computes them from the record, from what
lies before each branch alone. Every run is a process of its own and writes one file, again after
each branch.

    python benchmarks/pack_data.py SOURCE data/forecast.xz          # once: a subset of the data
    python benchmarks/forecast.py RUN ... --data data/forecast.xz --tokens data/tokens.bin.xz
        [--out DIR] [--workers 12] [--minutes 9] [--schedules] [--tiny]

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forecast_tasks import TASKS, ForecastTask, Training

import equilibrate as eq
from equilibrate.record.provenance import environment

OUT = Path(__file__).parent / "results" / "forecast"
AGES = (32, 128, 512)
"""Mean ages of the running means, in steps."""
GROWING = 0.05
"""Half-life of the last mean as a share of the steps so far, as in torchtitan."""
MEAN_EVERY, CHECK_EVERY = 4, 50
PLACES = 49
"""Steps around a moment whose losses are averaged while the learning rate is not zero."""
PARTS = 4
"""At each of these steps one in so many of the batches is evaluated."""
AFTER = 64
"""How many steps after the end of a branch the batches come that it is evaluated on."""


class Means:
    """Running means of the parameters of a training."""

    def __init__(self, training: Training) -> None:
        self._params = list(training.model.parameters())
        self._means = [[p.detach().clone() for p in self._params] for _ in (*AGES, GROWING)]
        self._weights = [0.0] * len(self._means)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the means towards the parameters."""
        growing = max(MEAN_EVERY, GROWING * step)
        decays = [2.718281828 ** (-MEAN_EVERY / age) for age in AGES]
        for i, decay in enumerate([*decays, 2 ** (-MEAN_EVERY / growing)]):
            self._weights[i] = decay * self._weights[i] + 1 - decay
            share = (1 - decay) / self._weights[i]
            for m, p in zip(self._means[i], self._params, strict=True):
                m.lerp_(p, share)

    @torch.no_grad()
    def values(self, training: Training, *, last: int | None = None) -> list[float]:
        """Return the loss of the next batch at the parameters and at each mean.

        Args:
            training: The training.
            last: Return the loss at the last mean alone, on batches after this step.
        """
        own = [p.detach().clone() for p in self._params]
        found = []
        for values in (own, *self._means) if last is None else self._means[-1:]:
            self._set(values)
            found.append(training.value() if last is None else training.evaluate(last))
        self._set(own)
        return found

    def _set(self, values: list[torch.Tensor]) -> None:
        for p, value in zip(self._params, values, strict=True):
            p.copy_(value)


class Evaluations:
    """Losses around some moments, on batches that come later.

    At each of several steps around a moment one part of the batches is evaluated, and each part at
    equally many steps, so that both fluctuate little.
    """

    def __init__(self, task: ForecastTask) -> None:
        spacing = 2 * task.around // (PLACES - 1)
        self._places = [spacing * (k - PLACES // 2) for k in range(PLACES)]
        moments = {(m, t + n) for t, ns in task.branches.items() for n in ns for m in (t, t + n)}
        self._moments = sorted(moments)
        self.found: dict[str, list[float]] = {}

    def at(self, training: Training) -> None:
        """Evaluate what is due at this step."""
        for moment, end in self._moments:
            if training.step - moment in self._places:
                place = self._places.index(training.step - moment)
                loss = training.evaluate(end + AFTER, PARTS, place)
                self.found.setdefault(f"{moment} {end}", []).append(round(loss, 6))


def run(task: ForecastTask, name: str, seed: int, *, options: argparse.Namespace) -> None:
    """Train one run, branch it, and write its record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = options.tokens if task.data.__qualname__.startswith("linux") else options.data
    examples = task.data(path, options.tiny).to(device)
    training = Training(task, examples, seed, tiny=options.tiny)
    evaluations = Evaluations(task)
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
        "ages": [*AGES, GROWING],
        "losses": [],
        "checks": [],
        "products": [],
        "evaluations": evaluations.found,
        "branches": [],
        "schedules": {},
    }
    out = options.out / f"{options.run[0].replace(':', '-')}.json"
    means = Means(training)
    forecaster = eq.Forecaster(training.optimizer)
    last = max(t + n for t, ns in task.branches.items() for n in ns)
    losses: list[torch.Tensor] = []
    for step in range(last + task.around + 1):
        evaluations.at(training)
        if step and step % CHECK_EVERY == 0:
            record["checks"].append([step, *(round(v, 6) for v in means.values(training))])
            _write(out, record, losses)
        if step == task.steps:
            (record["schedules"]["averaged"],) = means.values(training, last=step + AFTER)
        if step in task.branches:
            saved, watched = training.save(), copy.deepcopy(forecaster.state_dict())
            kinds = [("cooldown", n) for n in task.branches[step]]
            if step == 2000 and not task.large:
                kinds += [(kind, task.branches[step][-1]) for kind in ("half", "tenth", "batch")]
            for kind, n in kinds:
                record["branches"].append(branch(training, saved, kind, step, n))
            training.restore(saved)
            forecaster.load_state_dict(watched)
            _write(out, record, losses)
            if time.time() > options.deadline:
                return
        losses.append(training.train(training.constant_lr()))
        if training.step % MEAN_EVERY == 0:
            means.update(training.step)
    state = forecaster.state_dict()["products"]
    rows = zip(state["steps"], state["ages"], state["values"], strict=True)
    record["products"] = [
        [step, round(age, 2), value] for step, age, (value, _) in sorted(rows) if step
    ]
    record["finished"] = True
    _write(out, record, losses)
    forecaster.detach()
    for name, floor in (("cosine", 0.0), ("cosine to a tenth", 0.1)):
        if options.schedules and time.time() < options.deadline:
            record["schedules"][name] = cosine(
                Training(task, examples, seed, tiny=options.tiny), floor
            )
            _write(out, record, losses)


def branch(
    training: Training, saved: dict[str, Any], kind: str, step: int, n: int
) -> dict[str, Any]:
    """Return the loss at the end of a branch over n steps."""
    training.restore(saved)
    base, end, around = training.constant_lr(), step + n, training.task.around
    if kind == "cooldown":
        for k in range(n):
            training.train(base * (n - 1 - k) / n)
        loss = training.evaluate(end + AFTER)
    else:
        evaluations = Evaluations(replace(training.task, branches={step: (n,)}))
        factor = {"half": 0.5, "tenth": 0.1, "batch": 1.0}[kind]
        while training.step <= end + around:
            if training.step >= end - around:
                evaluations.at(training)
            training.train(base * factor, batches=2 if kind == "batch" else 1)
        found = evaluations.found[f"{end} {end}"]
        loss = sum(found) / len(found)
    print(f"{training.task.title}: step {step}, {kind} over {n} steps: {loss:.4f}", flush=True)
    return {"step": step, "kind": kind, "horizon": n, "loss": round(loss, 6)}


def cosine(training: Training, floor: float) -> float:
    """Return the loss at the end of a training whose learning rate falls as a cosine to a floor."""
    total, warm_up = training.task.steps, training.task.warm_up
    for step in range(total):
        share = max(0.0, (step + 1 - warm_up) / (total - warm_up))
        decay = floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2
        training.train(training.constant_lr() * decay)
    loss = training.evaluate(total + AFTER)
    print(f"{training.task.title}: cosine to {floor}: {loss:.4f}", flush=True)
    return round(loss, 6)


def _write(path: Path, record: dict[str, Any], losses: list[torch.Tensor]) -> None:
    if new := losses[len(record["losses"]) :]:
        record["losses"] += [round(loss, 5) for loss in torch.stack(new).tolist()]
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
    parser.add_argument("--data", type=Path, help="the file that pack_data.py wrote")
    parser.add_argument("--tokens", type=Path, help="tokens for GPT-2, packed by xz")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=9, help="end with a branch after this")
    parser.add_argument("--schedules", action="store_true", help="train with cosines, too")
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
            task = replace(task, branches={240: (24, 60)}, around=48, **small)
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high")
        run(task, name, int(seed), options=options)
        return
    shared = [f"--{name}" for name in ("tiny", "schedules") if getattr(options, name)]
    for name in ("data", "tokens", "out", "deadline"):
        if (value := getattr(options, name)) is not None:
            shared += [f"--{name}", str(value)]
    jobs = [[sys.executable, __file__, job, *shared] for job in options.run]
    if failed := launch(jobs, options.workers):
        raise SystemExit(f"{failed} of {len(jobs)} runs failed")


if __name__ == "__main__":
    main()
