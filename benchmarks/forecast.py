"""Forecasts of what a cooldown gains, against what cooldowns of the same runs have gained.

A run is trained at a constant learning rate with an `equilibrate.Forecaster` (the trunk). At some
steps it is branched: the same parameters, optimizer state and batches go on with a learning rate

- constant,
- lowered linearly to zero over 150 and over 400 steps,
- lowered to a tenth at once.

The training loss on fixed examples is evaluated before and after; so is the loss at exponential
averages of the parameters (half-life 0.242 times the length of the cooldown), which is the rival
that costs a forward pass. Every run is a process of its own and writes one file, again after each
branch. Branches that a file holds are not made again.

    python benchmarks/pack_data.py SOURCE data/forecast.xz          # once: a subset of the data
    python benchmarks/forecast.py --data data/forecast.xz --out DIR [--models mlp ...]
        [--seeds 3] [--workers 12] [--minutes 9] [--dry-run]
    python benchmarks/forecast.py --figure --out DIR                # table and figure of the record
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forecast_tasks import TASKS, ForecastTask, Training, half_life_decay
from torch import Tensor

import equilibrate as eq
from equilibrate.forecast.match import exponential_match
from equilibrate.record.provenance import environment
from equilibrate.watching.watcher import measured_position

OUT = Path(__file__).parent / "results" / "forecast"
HORIZONS = (150, 400)
HALF_LIFE = 0.242
AROUND = (-32, -16, 0, 16, 32)
"""Steps around the end of a branch at a constant rate whose losses are averaged."""


class StepAverages:
    """Exponential averages of the parameters, one for each horizon, updated at every step."""

    def __init__(self, training: Training, horizons: tuple[int, ...]) -> None:
        self._params = list(training.model.parameters())
        self._averages = {n: [p.detach().clone() for p in self._params] for n in horizons}
        self._decays = {n: half_life_decay(HALF_LIFE * n) for n in horizons}

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters."""
        for n, average in self._averages.items():
            torch._foreach_lerp_(average, self._params, 1 - self._decays[n])  # pyright: ignore

    @torch.no_grad()
    def losses(self, training: Training) -> dict[int, float]:
        """Return the training loss at each average."""
        saved = [p.detach().clone() for p in self._params]
        found = {}
        for n, average in self._averages.items():
            for p, m in zip(self._params, average, strict=True):
                p.copy_(m)
            found[n] = training.evaluate()
        for p, s in zip(self._params, saved, strict=True):
            p.copy_(s)
        return found


class Independent:
    """What a forecaster would sample if each batch were drawn independently of all others.

    Batches of one epoch are not: the parameters have already moved along the noise of those before.
    Another batch at the same parameters, and with the same means, shows how much that matters.
    """

    def __init__(self, forecaster: eq.Forecaster, training: Training) -> None:
        self._forecaster = forecaster
        self._generator = torch.Generator().manual_seed(training.seed)
        self._steps: list[int] = []
        self._samples: list[Tensor] = []

    def sample(self, training: Training) -> None:
        """Take a sample before a step at which the forecaster takes one."""
        step, every = self._forecaster.step, self._forecaster.every
        if step % every != measured_position(step // every, every):
            return
        gradient = training.independent_gradient(self._generator)
        params = list(training.model.parameters())
        products = []
        for horizon in self._forecaster.horizons:
            own = [p.detach().clone() for p in params]
            with self._forecaster.averaged(horizon=horizon), torch.no_grad():
                parts = zip(own, params, gradient, strict=True)
                products.append(torch.stack([((p - m) * g).sum() for p, m, g in parts]).sum())
        self._steps.append(step)
        self._samples.append(torch.stack(products))

    def forecasts(self) -> dict[int, list[float]]:
        """Return the forecasts, with errors; over the same windows as the forecaster's."""
        found = {}
        samples = torch.stack(self._samples).double().cpu()
        for i, horizon in enumerate(self._forecaster.horizons):
            match = exponential_match(horizon, self._forecaster.every)
            seen = self._forecaster.step
            since = max(horizon, seen // 2, seen - 8 * horizon)
            first = sum(step < since for step in self._steps)
            estimate = eq.estimates.mean(match.factor / 2 * samples[first:, i])
            found[horizon] = [estimate.value, estimate.stderr, estimate.margin]
        return found


def run(
    task: ForecastTask,
    name: str,
    seed: int,
    *,
    data: Path | None,
    out: Path,
    deadline: float,
    horizons: tuple[int, ...] = HORIZONS,
    every: int = 16,
    tiny: bool = False,
) -> None:
    """Train one run, branch it, and write its record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    examples = task.data(data, tiny).to(device)
    record = _read(out) or {
        "model": name,
        "title": task.title,
        "seed": seed,
        "settings": task.settings,
        "batch_size": task.batch_size,
        "examples": len(examples),
        "data": examples.fingerprint,
        "horizons": list(horizons),
        "every": every,
        "environment": environment(),
        "trunk": [],
        "branches": [],
    }
    done = {branch["step"] for branch in record["branches"]}
    training = Training(task, examples, seed, tiny=tiny)
    forecaster = eq.Forecaster(training.optimizer, horizons, every)
    averages = StepAverages(training, horizons)
    independent = Independent(forecaster, training)
    losses: list[Tensor] = []
    trunk, near, width = [], [], 5 * every // 8
    for time_ in task.times:
        while training.step < time_:
            independent.sample(training)
            losses.append(training.train(training.constant_lr()))
            averages.update()
            if training.step % 50 == 0:
                trunk.append(
                    {
                        "step": training.step,
                        "loss": torch.stack(losses[-50:]).double().mean().item(),
                        "forecasts": _plain(forecaster.forecasts()),
                    }
                )
            if time_ not in done and time_ - training.step in range(0, 8 * width, width):
                near.append(training.evaluate())
        if time_ in done:
            continue
        if time.time() > deadline:
            break
        begun = time.monotonic()
        branch: dict[str, Any] = {
            "step": time_,
            "before": training.evaluate(),
            "before_nearby": near,
            "forecasts": _plain(forecaster.forecasts()),
            "independent": independent.forecasts(),
            "averaged": averages.losses(training),
        }
        near = []
        branch |= branches(training, horizons)
        branch["seconds"] = time.monotonic() - begun
        record["branches"] = sorted([*record["branches"], branch], key=lambda b: b["step"])
        record["trunk"] = max(trunk, record["trunk"], key=len)
        _write(out, record)
        print(_line(record, branch), flush=True)
    record["trunk"] = max(trunk, record["trunk"], key=len)
    record["finished"] = len(record["branches"]) == len(task.times)
    _write(out, record)


def branches(training: Training, horizons: tuple[int, ...]) -> dict[str, Any]:
    """Return the losses at the ends of all branches that begin here."""

    def follow(lr: Callable[[int], float], ends: dict[int, list[int]]) -> dict[int, float]:
        """Train with learning rates; return mean losses over some steps for each horizon."""
        copied = _copy(training)
        found: dict[int, float] = {}
        for k in range(max(max(steps) for steps in ends.values())):
            copied.train(lr(k))
            if any(k + 1 in steps for steps in ends.values()):
                found[k + 1] = copied.evaluate()
        return {n: sum(found[k] for k in steps) / len(steps) for n, steps in ends.items()}

    base = training.constant_lr()
    scale = min(1.0, min(horizons) / 64)
    around = {n: [n + round(scale * k) for k in AROUND] for n in horizons}
    return {
        "constant": follow(lambda _: base, around),
        "tenth": follow(lambda _: base / 10, around),
        "cooldown": {
            n: follow(lambda k, n=n: base * (n - 1 - k) / n, {n: [n]})[n] for n in horizons
        },
    }


def _copy(training: Training) -> Training:
    copied = copy.copy(training)
    copied.model = copy.deepcopy(training.model)
    kind = type(training.optimizer)
    copied.optimizer = kind(copied.model.parameters(), **training.task.settings)
    copied.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    return copied


def _plain(forecasts: tuple[eq.Forecast, ...]) -> dict[int, list[float] | None]:
    return {
        f.horizon: None if f.undefined else [f.gain.value, f.gain.stderr, f.gain.margin]
        for f in forecasts
    }


def _line(record: dict[str, Any], branch: dict[str, Any]) -> str:
    parts = [
        f"{n}: forecast {branch['forecasts'][n][0]:.4f} ± {branch['forecasts'][n][2]:.4f}, "
        f"gained {branch['before'] - branch['cooldown'][n]:.4f}"
        for n in record["horizons"]
    ]
    where = f"{record['model']} {record['seed']} step {branch['step']}"
    return f"{where} ({branch['seconds']:.0f} s): {'; '.join(parts)}"


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
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


def main(arguments: list[str] | None = None) -> None:
    """Run all runs, or draw what was recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=8.5, help="start no branch after this")
    parser.add_argument("--dry-run", action="store_true", help="tiny models, in this process")
    parser.add_argument("--figure", action="store_true", help="draw what was recorded")
    parser.add_argument("--run", nargs=2, metavar=("MODEL", "SEED"), help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.figure:
        import forecast_figure  # matplotlib is not needed to run anything

        forecast_figure.main(options.out)
        return
    if options.dry_run:
        if options.out == OUT:
            parser.error("--dry-run needs --out: it cannot overwrite measured results")
        for name in options.models:
            task = replace(TASKS[name], times=(120, 160), batch_size=8, warm_up=0, examples=32)
            run(
                task, name, 0, data=None, out=options.out / f"{name}-0.json",
                deadline=float("inf"), horizons=(16, 40), every=4, tiny=True,
            )  # fmt: skip
        return
    if options.run:
        name, seed = options.run[0], int(options.run[1])
        torch.set_num_threads(1)
        out = options.out / f"{name}-{seed}.json"
        run(TASKS[name], name, seed, data=options.data, out=out, deadline=options.deadline)
        return
    deadline = time.time() + 60 * options.minutes
    jobs = []
    for seed in range(options.seeds):
        for name in options.models:
            found = _read(options.out / f"{name}-{seed}.json")
            if not (found and found.get("finished")):
                jobs.append([sys.executable, __file__, "--run", name, str(seed)])
    shared = ["--deadline", deadline, "--out", options.out, "--data", options.data]
    jobs = [[*job, *map(str, shared)] for job in jobs]
    failed = launch(jobs, options.workers)
    if failed:
        raise SystemExit(f"{failed} of {len(jobs)} runs failed")


if __name__ == "__main__":
    main()
