"""The cost of a monitored training step on a CPU, relative to a bare one.

Each variant trains its own copy of the model on one thread. A round runs a block of steps of each
variant in random order. The clock is the CPU time of the thread, which depends less than wall time
on other programs. Only the part of a step that follows the backward pass differs between variants,
so the ratio is

    1 + (update time of the variant − update time of bare) / (step time of bare)

within a round, and the median over rounds. "bare again" is a second bare variant: its ratio is the
noise. For ResNet-18 a block computes the gradients once and then makes 16 updates with them: the
parameters do not fit into the cache, so an update costs the same, and a round takes seconds.

    python benchmarks/overhead.py [--workload NAME ...] [--rounds N] [--out FILE]
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness import command, compare, interleave
from watchers import WATCHERS, Bare
from workloads import OPTIMIZERS, Workload, make_optimizer, mlp, resnet18


@dataclass(frozen=True)
class Case:
    """A model, its optimizer and how they are measured."""

    build: Callable[[], Workload]
    optimizer: str
    rounds: int
    updates: int
    """Updates in a block, a multiple of 16."""
    gradients_once: bool = False
    """Whether a block computes gradients only before its first update."""


MLP = partial(mlp, "cpu")
WORKLOADS = {
    "mlp-sgd": Case(MLP, "sgd-decay", rounds=60, updates=64),
    "mlp-momentum": Case(MLP, "momentum", rounds=60, updates=64),
    "mlp-adamw": Case(MLP, "adamw", rounds=60, updates=64),
    "resnet18": Case(
        partial(resnet18, "cpu", batch_size=16), "momentum", 15, updates=16, gradients_once=True
    ),
}


@dataclass(frozen=True)
class Seconds:
    """CPU time of one backward pass, forward pass included, and of one update."""

    gradients: float
    update: float


class CpuLoop:
    """A training loop with its own model, optimizer and watcher."""

    def __init__(self, workload: Workload, case: Case, watcher: Callable[..., Bare]) -> None:
        self.workload, self.case = workload, case
        self.model = copy.deepcopy(workload.model)
        self.optimizer = make_optimizer(case.optimizer, self.model.parameters())
        self.watcher = watcher(self.model, self.optimizer)
        self.measure(2)

    def measure(self, updates: int | None = None) -> Seconds:
        """Run a block of steps and return the mean CPU times of their parts."""
        updates = updates or self.case.updates
        self._backward()  # not timed: brings the data of this variant into the cache
        gradients = update = 0.0
        passes = 0
        for i in range(updates):
            if not self.case.gradients_once or i == 0:
                gradients += _cpu_time(self._backward)
                passes += 1
            update += _cpu_time(self._update)
        return Seconds(gradients / passes, update / updates)

    def _backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss = self.workload.backward(self.model)

    def _update(self) -> None:
        self.watcher.before_step()
        self.optimizer.step()
        self.watcher.after_step(self.loss)


def _cpu_time(work: Callable[[], None]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def run(case: Case) -> dict[str, Any]:
    """Measure one workload."""
    workload = case.build()
    watchers = {name: kind for name, kind in WATCHERS.items() if "histograms" not in name}
    loops = {name: CpuLoop(workload, case, watcher) for name, watcher in watchers.items()}
    rounds = interleave({name: loop.measure for name, loop in loops.items()}, case.rounds)
    bare = rounds["bare"]
    steps = [t.gradients + t.update for t in bare]
    return {
        "workload": workload.title,
        "parameters": workload.parameters,
        "batch": list(workload.inputs.shape),
        "optimizer": case.optimizer,
        "settings": OPTIMIZERS[case.optimizer][1],
        "rounds": case.rounds,
        "updates_per_block": case.updates,
        "gradients_once": case.gradients_once,
        "variants": {
            name: {
                "step": compare(
                    [b.gradients + t.update for t, b in zip(times, bare, strict=True)], steps
                ),
                "whole_step": compare([t.gradients + t.update for t in times], steps),
                "update": compare([t.update for t in times], [t.update for t in bare]),
            }
            for name, times in rounds.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """Return one workload as lines of text."""
    lines = [
        f"{result['workload']}, {result['optimizer']}, batch {result['batch'][0]}: "
        f"{result['rounds']} rounds of {result['updates_per_block']} updates",
        f"{'':26} {'ratio':28} {'whole step':28} update, µs",
    ]
    for name, row in result["variants"].items():
        ratio, whole = row["step"].as_ratio(4), row["whole_step"].as_ratio(3)
        lines.append(f"{name:26} {ratio:28} {whole:28} {1e6 * row['update'].median:.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    command(__file__, __doc__, WORKLOADS, run, table)
