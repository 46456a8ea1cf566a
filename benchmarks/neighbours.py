"""The cost of a training step with a monitor, physfdt or Cockpit, relative to a bare one, on a CPU.

The MLP of `overhead.py` with plain SGD, on one thread. physfdt measures both sides of the same
relation; Cockpit's smallest configuration, "economy", measures several statistics of individual
gradients with BackPACK. Each variant trains its own copy of the model. A round runs a block of 16
steps of each variant in random order; the ratio is the median over rounds.

    pip install physfdt cockpit-for-pytorch 'setuptools<80'
    python benchmarks/neighbours.py [--rounds N] [--out FILE]

A package that cannot be imported is left out.
"""

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from harness import compare, interleave, write
from torch import nn
from workloads import mlp

import equilibrate as eq

OUT = Path(__file__).parent / "results" / "neighbours.json"
STEPS = 16


class Loop:
    """Plain SGD on a copy of the model; the base class of all variants."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.model, self.inputs, self.targets = copy.deepcopy(model), inputs, targets
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        """Make one training step."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.inputs), self.targets).backward()
        self.update()

    def update(self) -> None:
        """Update the parameters."""
        self.optimizer.step()

    def seconds_per_step(self) -> float:
        """Return the CPU time of this thread for a step, averaged over a block."""
        begun = time.thread_time()
        for _ in range(STEPS):
            self.step()
        return (time.thread_time() - begun) / STEPS


class Monitored(Loop):
    """With `equilibrate.Monitor`."""

    def __init__(self, *workload: Any, every: int) -> None:
        super().__init__(*workload)
        self.monitor = eq.Monitor(self.optimizer, every=every)


class Physfdt(Loop):
    """With `physfdt.FDRMonitor`."""

    def __init__(self, *workload: Any, every: int) -> None:
        from physfdt import FDRMonitor  # pyright: ignore[reportMissingImports]

        super().__init__(*workload)
        self.monitor = FDRMonitor(self.optimizer, every=every)

    def update(self) -> None:
        """Update the parameters."""
        with self.monitor.measure():
            self.optimizer.step()


class WithCockpit(Loop):
    """With Cockpit's "economy" configuration at every k-th step."""

    def __init__(self, *workload: Any, every: int) -> None:
        from backpack import extend  # pyright: ignore[reportMissingImports]
        from cockpit import Cockpit  # pyright: ignore[reportMissingImports]
        from cockpit.utils import schedules  # pyright: ignore[reportMissingImports]
        from cockpit.utils.configuration import (  # pyright: ignore[reportMissingImports]
            configuration,
        )

        super().__init__(*workload)
        self.model = extend(self.model)
        self.loss = extend(nn.CrossEntropyLoss())
        schedule = schedules.linear(interval=every)
        self.cockpit = Cockpit(
            self.model.parameters(), quantities=configuration("economy", track_schedule=schedule)
        )
        self.count = 0

    def step(self) -> None:
        """Make one training step."""
        self.optimizer.zero_grad()
        outputs = self.model(self.inputs)
        loss = self.loss(outputs, self.targets)
        info = {
            "batch_size": len(self.inputs),
            "individual_losses": nn.functional.cross_entropy(
                outputs, self.targets, reduction="none"
            ),
            "loss": loss,
            "optimizer": self.optimizer,
        }
        with self.cockpit(self.count, info=info):
            loss.backward(create_graph=self.cockpit.create_graph(self.count))
        self.optimizer.step()
        self.count += 1


VARIANTS: dict[str, Callable[..., Loop]] = {
    "bare": Loop,
    "bare again": Loop,
    "Monitor, every=1": partial(Monitored, every=1),
    "Monitor, every=16": partial(Monitored, every=16),
    "physfdt, every=1": partial(Physfdt, every=1),
    "physfdt, every=16": partial(Physfdt, every=16),
    "Cockpit economy, every=16": partial(WithCockpit, every=16),
}


def run(rounds: int) -> dict[str, Any]:
    """Measure all variants whose packages can be imported."""
    workload = mlp("cpu")
    loops: dict[str, Loop] = {}
    for name, kind in VARIANTS.items():
        try:
            loops[name] = kind(workload.model, workload.inputs, workload.targets)
        except ImportError as error:
            print(f"{name}: left out, {error}")
    for loop in loops.values():
        loop.seconds_per_step()
    times = interleave({name: loop.seconds_per_step for name, loop in loops.items()}, rounds)
    return {
        "workload": workload.title,
        "rounds": rounds,
        "steps_per_block": STEPS,
        "versions": {name: _version(name) for name in ("physfdt", "cockpit-for-pytorch")},
        "variants": {name: compare(times[name], times["bare"]) for name in times},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both packages warn about newer versions of torch
        result = run(options.rounds)
    for name, row in result["variants"].items():
        print(f"{name:28} {row.as_ratio(3)}")
    write(options.out, result)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
