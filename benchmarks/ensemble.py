"""How much sooner an ensemble of R replicas is done than R runs one after the other, on a CPU.

All variants train the same models on the same data, one thread, interleaved: a round is an epoch
of R replicas in each. The clock is the thread's own CPU time (what other processes do on the
machine counts less); wall-clock ratios stand beside it.

    python benchmarks/ensemble.py [--workload NAME ...] [--rounds N] [--out FILE]

Rows of a table:
    alone, again        R plain torch loops, each with `equilibrate.Monitor`: their ratio is noise
    alone, bare         the same loops with no monitor, which measure nothing
    ensemble            `equilibrate.Ensemble`, which measures what the monitor does and more
    ensemble, vmap      the same with the network through `torch.func.vmap` as a whole
    products            the matrix products of the networks and nothing else (MLPs only): no
                        variant can do without them, so this bounds the speed-up
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from harness import command, compare, interleave, markdown
from torch import nn

import equilibrate as eq
from equilibrate.ensemble._ops.plain import PlainOps
from equilibrate.ensemble.network import Network
from equilibrate.ensemble.parameters import tensor_views
from equilibrate.paper.protocol.models import ARCHITECTURES, build

BATCH = 100


@dataclass(frozen=True)
class Workload:
    """R replicas of a model, and the steps of an epoch."""

    model: str
    sgd: dict[str, Any]
    replicas: int = 8
    steps: int = 20
    rounds: int = 30


WORKLOADS = {
    "mlp": Workload("mlp", {"lr": 0.1, "weight_decay": 0.01}),
    "cnn": Workload(
        "cnn", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, replicas=4, steps=3, rounds=10
    ),
    "digits-mlp": Workload("digits-mlp", {"lr": 0.1, "weight_decay": 0.01}),
    "digits-cnn": Workload(
        "digits-cnn", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, rounds=20
    ),
}


class Task:
    """The models and data of a workload, the same for all variants."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        generator = torch.Generator().manual_seed(0)
        examples = workload.steps * BATCH
        shape = ARCHITECTURES[workload.model].input_shape
        self.images = torch.randn(examples, *shape, generator=generator)
        self.labels = torch.randint(10, (examples,), generator=generator)
        self.seeds = range(workload.replicas)

    def alone(self, watched: bool) -> Callable[[], None]:
        """Loops that run one after the other."""
        loops = []
        for seed in self.seeds:
            model = build(self.workload.model, seed)
            optimizer = torch.optim.SGD(model.parameters(), **self.workload.sgd)
            monitor = eq.Monitor(optimizer) if watched else None
            loops.append((model, optimizer, monitor))

        def run() -> None:
            for model, optimizer, _ in loops:
                for batch in torch.randperm(len(self.images)).split(BATCH):
                    optimizer.zero_grad()
                    F.cross_entropy(model(self.images[batch]), self.labels[batch]).backward()
                    optimizer.step()

        return run

    def ensemble(self, explicit: bool) -> Callable[[], object]:
        """All at once."""
        models = [build(self.workload.model, seed) for seed in self.seeds]
        data = self.images, self.labels
        ensemble = eq.Ensemble(models, F.cross_entropy, data, seeds=self.seeds, **self.workload.sgd)
        if not explicit:
            ensemble._runner._network = Network(
                models[0],
                F.cross_entropy,
                ensemble.parameters,
                tensor_views(ensemble._flat.gradient, ensemble._shapes),
                ops=PlainOps(),
                explicit=False,
            )
        return ensemble.run_epoch

    def products(self) -> Callable[[], None]:
        """Forward, weight gradient and, but for the first layer, input gradient."""
        models = [build(self.workload.model, seed) for seed in self.seeds]
        networks = [
            [
                (weight, torch.randn(BATCH, weight.shape[1]), torch.randn(BATCH, weight.shape[0]))
                for weight in (m.weight.detach() for m in model if isinstance(m, nn.Linear))
            ]
            for model in models
        ]

        def run() -> None:
            for layers in networks * self.workload.steps:
                for k, (weight, inputs, outputs) in enumerate(layers):
                    torch.mm(inputs, weight.T)
                    torch.mm(outputs.T, inputs)
                    if k:
                        torch.mm(outputs, weight)

        return run


@dataclass(frozen=True)
class Seconds:
    """Wall-clock and CPU time of a step of one replica."""

    wall: float
    cpu: float


def timed(run: Callable[[], object], steps: int) -> Callable[[], Seconds]:
    """Measure `run`, which does so many steps of one replica."""

    def measure() -> Seconds:
        cpu, wall = time.thread_time(), time.perf_counter()
        run()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        return Seconds(wall / steps, cpu / steps)

    run()  # not timed: the first time things are set up
    return measure


def run(workload: Workload) -> dict[str, Any]:
    """Measure one workload."""
    task = Task(workload)
    variants = {
        "alone": task.alone(watched=True),
        "alone, again": task.alone(watched=True),
        "alone, bare": task.alone(watched=False),
        "ensemble": task.ensemble(explicit=True),
        "ensemble, vmap": task.ensemble(explicit=False),
    }
    if not ARCHITECTURES[workload.model].convolutions:
        variants["products"] = task.products()
    steps = workload.steps * workload.replicas
    measured = {name: timed(variant, steps) for name, variant in variants.items()}
    rounds = interleave(measured, workload.rounds)
    alone = rounds["alone"]
    return {
        "model": workload.model,
        "replicas": workload.replicas,
        "sgd": workload.sgd,
        "rounds": workload.rounds,
        "steps_a_round": workload.steps,
        # How many times less a variant takes than runs one after the other.
        "variants": {
            name: {
                "seconds": compare([t.cpu for t in times], [t.cpu for t in alone]),
                "speedup_cpu": compare([t.cpu for t in alone], [t.cpu for t in times]),
                "speedup_wall": compare([t.wall for t in alone], [t.wall for t in times]),
            }
            for name, times in rounds.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """One workload as a table of Markdown."""
    return markdown(
        result["model"],
        result,
        f"{result['replicas']} replicas, batch {BATCH}",
        ["CPU ms a replica and step (quartiles)", "times faster, CPU", "times faster, wall"],
        (
            [
                name,
                row["seconds"].in_milliseconds(),
                row["speedup_cpu"].as_ratio(2),
                row["speedup_wall"].as_ratio(2),
            ]
            for name, row in result["variants"].items()
        ),
    )


if __name__ == "__main__":
    command(__file__, __doc__, WORKLOADS, run, table)
