r"""Runs beyond the tables of the training study: the recommended recipe, called as users call it.

The study's arm hands one mean loss over at each check. The recipe is an `FDRScheduler` that is
given the loss of every batch, beside torch's own warm-up where the task has one. This makes both
for one budget, on the reported seeds:

    python benchmarks/training_checks.py --data data/training.xz --task mlp --lr 0.1
    python benchmarks/training_checks.py --data data/training.xz --task resnet --lr 0.2 \
        --kinds recipe

A line of JSON for each run goes to results/training/checks; what is there is not made again.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LinearLR
from training_study import checks, data, runs
from training_study.arms import ARMS, Context
from training_study.study import Study, open_study
from training_study.tasks import TASKS, Loop, Network

import equilibrate as eq
from equilibrate.record.provenance import environment

OUT = Path(__file__).parents[1] / "results" / "training"


def warm_up_of(loop: Loop) -> LinearLR:
    """Return the scheduler of the task's warm-up, which multiplies by one without any."""
    steps = max(1, loop.network.task.warm_up)
    return LinearLR(loop.optimizer, 1 / steps, total_iters=steps - 1)


def by_recipe(loop: Loop, budget: int) -> list[tuple[int, str]]:
    """Train with the scheduler; return when and why it began to cool down."""
    warm_up = warm_up_of(loop)
    scheduler = eq.FDRScheduler(loop.optimizer, rule=eq.rules.Gain(), cooldown_end=budget)
    acted = []
    for _ in range(budget):
        before = loop.network.total.clone()
        loop.train()
        warm_up.step()
        scheduler.step(loop.network.total - before)
        if scheduler.last_decision.lowered:
            acted.append((loop.step, scheduler.last_decision.reason))
    return acted


def by_arm(loop: Loop, budget: int) -> list[tuple[int, str]]:
    """Train with the arm of the study; return when and why it began to cool down."""
    warm_up = warm_up_of(loop)
    cadence = Study().cadence.fitted(loop.network.epoch)
    control = ARMS["gain-start"].make(Context(loop.optimizer, budget, budget, {}, cadence))
    group = loop.optimizer.param_groups[0]
    total = 0.0
    for step in range(budget):
        lr = group["lr"]
        group["lr"] = lr * control.factor(step)
        loop.train()
        group["lr"] = lr
        warm_up.step()
        if loop.step % cadence.check == 0:
            mean = (loop.network.total.item() - total) / cadence.check
            total = loop.network.total.item()
            control.check(loop.step, mean)
    return control.acted


KINDS: dict[str, Callable[[Loop, int], list[tuple[int, str]]]] = {
    "recipe": by_recipe,
    "arm": by_arm,
}


def run(kind: str, name: str, lr: float, seed: int, budget: int, file: Path) -> dict[str, Any]:
    """Return the record of a run."""
    device, task = runs.prepare(), TASKS[name]
    examples = data.load(task.data, file)
    network = Network(task, examples, device)
    loop = Loop(network, seed, ARMS["constant"].build(task, {"lr": lr}, device))
    acted = KINDS[kind](loop, budget)
    metric, loss = loop.metric(examples.test.to(device))
    where = environment()
    return {
        "kind": kind, "task": name, "lr": lr, "seed": seed, "budget": budget, "acted": acted,
        "metric": metric, "loss": loss, "data": examples.fingerprint,
        "where": {key: where[key] for key in ("equilibrate", "commit", "torch", "gpu", "started")},
    }  # fmt: skip


def main() -> None:
    """Make the runs that are missing, and print all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="what pack_data.py --study wrote")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path, default=OUT / "checks", help="folder of the records")
    options = parser.parse_args()
    study = open_study(OUT)
    if study is None:
        parser.error(f"{OUT} holds no study")
    for kind in options.kinds:
        path = checks.path_of(options.out, options.task, kind, options.lr, runs.prepare())
        found = checks.lines_of(path)
        for seed in study.seeds[len(found) :]:
            budget = study.budgets[options.task]
            found.append(run(kind, options.task, options.lr, seed, budget, options.data))
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as lines:
                lines.write(json.dumps(found[-1], ensure_ascii=False) + "\n")
            print(kind, seed, found[-1]["metric"], found[-1]["acted"], flush=True)
        metrics = [row["metric"] for row in found]
        print(f"{kind}: {statistics.mean(metrics):.4f}, sd {statistics.stdev(metrics):.4f}")


if __name__ == "__main__":
    main()
