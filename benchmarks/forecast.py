"""Branch trainings at a constant learning rate, to see what forecasts of cooldowns are worth.

A run is trained at a constant learning rate (the trunk). Recorded are the loss of every step and,
every 50 steps, the loss of the next batch at the parameters and at running means of them, with mean
ages from 16 to 1,024 steps and with a half-life of 5 % of the steps so far. At some steps the trunk
is branched: the same parameters, optimizer state and batches go on with a learning rate that falls
linearly to zero over n steps; at one step also halved, lowered to a tenth, or with twice the batch.
The loss on batches that come after the n steps is evaluated around the beginning, around the end of
n more steps of the trunk, and at the end of the branch.

The trunk knows nothing of forecasts: `forecast_table.py` computes them from the record, from what
lies before each branch alone. Every run is a process of its own and writes one file, again after
each branch.

    python benchmarks/pack_data.py SOURCE data/forecast.xz          # once: a subset of the data
    python benchmarks/forecast.py RUN ... --data data/forecast.xz [--tokens data/tokens.bin.xz]
        [--out DIR] [--workers 12] [--minutes 9] [--tiny]

A RUN is a task, a seed, and by what learning rate and batch size are multiplied: `gpt2:0`,
`vit:3:0.5`, `mlp:1:1:4`. Branches may be given, too, as `gpt2:1:0.5:1:700+350,1300+150+500`.
"""

import argparse
import copy
import json
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
AGES = (16, 32, 64, 128, 256, 512, 1024)
"""Mean ages of the running means, in steps."""
GROWING = 0.05
"""Half-life of the last mean as a share of the steps so far, as in torchtitan."""
MEAN_EVERY, CHECK_EVERY = 4, 50
AROUND = range(-48, 49, 16)
"""Steps around a moment whose losses are averaged while the learning rate is not zero."""
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
    def values(self, training: Training) -> list[float]:
        """Return the loss of the next batch at the parameters and at each mean."""
        own = [p.detach().clone() for p in self._params]
        found = []
        for values in (own, *self._means, own):
            for p, value in zip(self._params, values, strict=True):
                p.copy_(value)
            found.append(training.value())
        return found[:-1]


def run(task: ForecastTask, name: str, seed: int, *, options: argparse.Namespace) -> None:
    """Train one run, branch it, and write its record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    examples = task.data(options.tokens if task.large else options.data, options.tiny).to(device)
    training = Training(task, examples, seed, tiny=options.tiny)
    record: dict[str, Any] = {
        "task": name,
        "title": task.title,
        "seed": seed,
        "settings": task.settings,
        "batch_size": training.batch_size,
        "warm_up": task.warm_up,
        "examples": len(examples),
        "data": examples.fingerprint,
        "evaluated_on": "coming batches",
        "environment": environment(),
        "ages": [*AGES, GROWING],
        "losses": [],
        "checks": [],
        "products": [],
        "evaluations": {},
        "branches": [],
    }
    out = options.out / f"{'-'.join(options.run[0].split(':')[:4])}.json"
    means = Means(training)
    forecaster = eq.Forecaster(training.optimizer)
    pairs = [(t, n) for t, ns in task.branches.items() for n in ns]
    losses: list[torch.Tensor] = []
    for step in range(max(t + n for t, n in pairs) + max(AROUND) + 1):
        for t, n in pairs:
            for name, moment in (("now", t), ("staying", t + n)):
                if step - moment in AROUND:
                    found = record["evaluations"].setdefault(f"{t} {n}", {"now": [], "staying": []})
                    found[name].append(round(training.evaluate(t + n + AFTER), 6))
        if step and step % CHECK_EVERY == 0:
            record["checks"].append([step, *(round(v, 6) for v in means.values(training))])
        if step in task.branches:
            saved, watched = training.save(), copy.deepcopy(forecaster.state_dict())
            kinds = [("cooldown", n) for n in task.branches[step]]
            if step == sorted(task.branches)[len(task.branches) // 2] and not task.large:
                kinds += [(kind, task.branches[step][-1]) for kind in ("half", "tenth", "batch")]
            for kind, n in kinds:
                record["branches"].append(branch(training, saved, kind, step, n))
            training.restore(saved)
            forecaster.load_state_dict(watched)
            _write(out, record, losses)
            if time.time() > options.deadline:
                break
        losses.append(training.train(training.constant_lr()))
        if training.step % MEAN_EVERY == 0:
            means.update(training.step)
    else:
        record["finished"] = True
    state = forecaster.state_dict()["products"]
    rows = zip(state["steps"], state["ages"], state["values"], strict=True)
    record["products"] = [
        [step, round(age, 2), value] for step, age, (value, _) in sorted(rows) if step
    ]
    _write(out, record, losses)


def branch(
    training: Training, saved: dict[str, Any], kind: str, step: int, n: int
) -> dict[str, Any]:
    """Return the loss at the end of a branch over n steps."""
    training.restore(saved)
    base, found = training.constant_lr(), []
    ends = [n] if kind == "cooldown" else [n + k for k in AROUND]
    for k in range(max(ends)):
        if kind == "cooldown":
            training.train(base * (n - 1 - k) / n)
        else:
            factor = {"half": 0.5, "tenth": 0.1, "batch": 1.0}[kind]
            training.train(base * factor, batches=2 if kind == "batch" else 1)
        if k + 1 in ends:
            found.append(training.evaluate(step + n + AFTER))
    loss = sum(found) / len(found)
    print(f"{training.task.title}: step {step}, {kind} over {n} steps: {loss:.4f}", flush=True)
    return {"step": step, "kind": kind, "horizon": n, "loss": round(loss, 6)}


def _write(path: Path, record: dict[str, Any], losses: list[torch.Tensor]) -> None:
    new = torch.stack(losses[len(record["losses"]) :]).tolist()
    record["losses"] += [round(loss, 5) for loss in new]
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
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.deadline = options.deadline or time.time() + 60 * options.minutes
    if len(options.run) == 1:
        name, seed, *factors = options.run[0].split(":")
        lr, batch, *branches = (*factors, "1", "1")[: max(2, len(factors))]
        task = changed(TASKS[name], float(lr), float(batch))
        for given in branches:
            parts = [list(map(int, part.split("+"))) for part in given.split(",")]
            task = replace(task, branches={t: tuple(ns) for t, *ns in parts})
        if options.tiny:
            task = replace(task, branches={240: (24, 60)}, batch_size=8, warm_up=0, evaluated=3)
        torch.set_num_threads(1)
        run(task, name, int(seed), options=options)
        return
    shared = [f"--{name}" for name in ("tiny",) if getattr(options, name)]
    for name in ("data", "tokens", "out", "deadline"):
        if (value := getattr(options, name)) is not None:
            shared += [f"--{name}", str(value)]
    jobs = [[sys.executable, __file__, job, *shared] for job in options.run]
    if failed := launch(jobs, options.workers):
        raise SystemExit(f"{failed} of {len(jobs)} runs failed")


if __name__ == "__main__":
    main()
