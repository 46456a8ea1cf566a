"""Final and intermediate training losses with `rules.Gain`, against a plateau rule and a cosine.

The batch-normalised ResNet and the byte-level transformer of `forecast_tasks.py`, each for a fixed
number of steps with several seeds. A loss, the mean over 150 steps, is handed to the schedulers as
often. The training loss on fixed examples is evaluated ten times, with the statistics of batches
behind BatchNorm.

- cosine: `CosineAnnealingLR` to zero at the end.
- plateau: `ReduceLROnPlateau(factor=0.5, patience=3)`; `patience` in checks of 150 steps.
- gain: `FDRScheduler(rule=Gain(), factor=0.5)`.
- gain, length known: the same with `Gain(total_steps=…)`.

    python benchmarks/schedules.py --data data/forecast.xz --out DIR [--models batchnorm …]
        [--seeds 2] [--steps 7000] [--workers 16] [--minutes 9] [--dry-run]
    python benchmarks/schedules.py --table --out DIR
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forecast import _read, _write, launch
from forecast_tasks import TASKS, Task, Training
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

import equilibrate as eq
from equilibrate.runlog.provenance import environment

OUT = Path(__file__).parent / "results" / "schedules"
SCHEDULES = ("cosine", "plateau", "gain", "gain, length known")
CHECK = 150


def make(name: str, training: Training, steps: int, every: int, check: int) -> LRScheduler:
    """Return a scheduler by its name."""
    optimizer = training.optimizer
    if name == "cosine":
        return CosineAnnealingLR(optimizer, steps // check)
    if name == "plateau":
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
    total = steps if "known" in name else None
    rule = eq.rules.Gain(total_steps=total)
    horizons = (4 * every, 8 * every) if check < CHECK else None
    forecaster = eq.Forecaster(optimizer, horizons, every)
    return eq.FDRScheduler(optimizer, rule=rule, factor=0.5, min_steps=1, forecaster=forecaster)


def run(
    task: Task,
    name: str,
    schedule: str,
    seed: int,
    steps: int,
    *,
    data: Path | None,
    out: Path,
    deadline: float,
    check: int = CHECK,
    every: int = 16,
    tiny: bool = False,
) -> None:
    """Train one run and write its record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    examples = task.data(data, tiny).to(device)
    training = Training(task, examples, seed, tiny=tiny)
    for group in training.optimizer.param_groups:
        group["lr"] = task.settings["lr"]
    scheduler = make(schedule, training, steps, every, check)
    record: dict[str, Any] = {
        "model": name,
        "schedule": schedule,
        "seed": seed,
        "steps": steps,
        "environment": environment(),
        "evaluations": [],
        "lowered": [],
    }
    losses = []
    while training.step < steps and time.time() < deadline:
        warm = training.constant_lr() / task.settings["lr"]
        group = training.optimizer.param_groups[0]
        scheduled = group["lr"]
        losses.append(training.train(warm * scheduled))
        group["lr"] = scheduled
        if training.step % check == 0:
            mean = torch.stack(losses[-check:]).mean()
            if schedule == "cosine":
                scheduler.step()
            else:
                scheduler.step(mean)  # pyright: ignore[reportArgumentType]
            if group["lr"] < scheduled and schedule != "cosine":
                decision = getattr(scheduler, "last_decision", None)
                reason = decision.reason if decision else ""
                record["lowered"].append([training.step, group["lr"], reason])
        if training.step % (steps // 10) == 0:
            record["evaluations"].append([training.step, training.evaluate()])
    record["finished"] = training.step == steps
    _write(out, record)
    ends = [f"{loss:.4f}" for _, loss in record["evaluations"][2::3]]
    at = [step for step, *_ in record["lowered"]]
    print(f"{name} {seed} {schedule}: {' '.join(ends)}, lowered at {at}", flush=True)


def table(out: Path) -> str:
    """Return the mean losses of all schedules at some times, with their spread over seeds."""
    records = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    rows = ["| | schedule | 30 % | 60 % | 100 % | lowered at |", "|" + " --- |" * 6]
    for model in dict.fromkeys(r["model"] for r in records):
        for schedule in SCHEDULES:
            runs = [r for r in records if (r["model"], r["schedule"]) == (model, schedule)]
            if not runs or not all(r["finished"] for r in runs):
                continue
            cells = []
            for i in (2, 5, 9):
                values = torch.tensor([r["evaluations"][i][1] for r in runs])
                spread = f" ± {values.std():.3f}" if len(runs) > 1 else ""
                cells.append(f"{values.mean():.3f}{spread}")
            at = "; ".join(" ".join(str(step) for step, *_ in r["lowered"]) or "–" for r in runs)
            rows.append(f"| {model} | {schedule} | {' | '.join(cells)} | {at} |")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    """Run all runs, or print the table of what was recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=["batchnorm", "transformer"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--dry-run", action="store_true", help="tiny models, in this process")
    parser.add_argument("--table", action="store_true", help="print what was recorded")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.table:
        print(table(options.out))
        return
    if options.dry_run:
        if options.out == OUT:
            parser.error("--dry-run needs --out: it cannot overwrite measured results")
        for schedule in SCHEDULES:
            name = options.models[0]
            task = replace(TASKS[name], batch_size=8, warm_up=0, examples=32)
            run(
                task, name, schedule, 0, 200, data=None, deadline=float("inf"), check=10, every=4,
                out=options.out / f"{name}-{schedule}-0.json", tiny=True,
            )  # fmt: skip
        print(table(options.out))
        return
    if options.run:
        name, schedule, seed = options.run
        torch.set_num_threads(1)
        run(
            TASKS[name], name, schedule, int(seed), options.steps, data=options.data,
            out=options.out / f"{name}-{schedule}-{seed}.json", deadline=options.deadline,
        )  # fmt: skip
        return
    deadline = time.time() + 60 * options.minutes
    shared = ["--deadline", deadline, "--out", options.out, "--data", options.data]
    shared += ["--steps", options.steps]
    jobs = []
    for seed in range(options.seeds):
        for name in options.models:
            for schedule in SCHEDULES:
                found = _read(options.out / f"{name}-{schedule}-{seed}.json")
                if not (found and found["finished"]):
                    job = [sys.executable, __file__, "--run", name, schedule, seed, *shared]
                    jobs.append([str(part) for part in job])
    failed = launch(jobs, options.workers)
    if failed:
        raise SystemExit(f"{failed} of {len(jobs)} runs failed")


if __name__ == "__main__":
    main()
