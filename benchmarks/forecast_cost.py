"""The cost of forecasts in a step of GPT-2 124M, compiled and in bfloat16, relative to a bare one.

    python benchmarks/forecast_cost.py [--rounds 3] [--steps 80] [--out FILE] [--tiny]

Blocks of bare steps, of steps with a `Forecaster` that samples one in 16 and compares losses, of
steps with one that samples all, and again of bare ones follow each other in turn. Each step is
timed, on a GPU by events that nothing waits for. Medians over steps tell what a step costs at which
nothing is sampled, a sample, and a comparison; the first two also for the second bare loop, whose
true cost is nothing. A training pays for a sample at one in 16 steps and a comparison at one in 50.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from forecast_tasks import TASKS, Data, Training

import equilibrate as eq

KINDS = {"bare": None, "one in 16": 16, "all": 1, "bare again": None}
"""How many steps there are for each sample; none without a forecaster."""


class Clock:
    """The times between ticks in seconds, on a GPU as it sees them."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._ticks: list[float] = []

    def tick(self) -> None:
        """Note the time."""
        self._ticks.append(time.perf_counter())
        if torch.cuda.is_available():
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()

    def times(self) -> np.ndarray:
        """Return the times between ticks; waits for the device."""
        if not self._events:
            return np.diff(self._ticks)
        torch.cuda.synchronize()
        return np.array([a.elapsed_time(b) / 1e3 for a, b in pairwise(self._events)])


def block(training: Training, every: int | None, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of each step of a block, and whether losses were compared at it."""
    horizon = 100 * (every or 1)  # with many samples in a half-life at any `every`
    forecaster = every and eq.Forecaster(training.optimizer, training.model, horizon, every)
    clock, calls, compared = Clock(), [], []
    for k in range(steps + 1):
        before = len(calls)
        loss = training.train(6e-4)
        if forecaster:
            forecaster.update(loss, lambda: calls.append(1) or training.again())
        clock.tick()
        if k:
            compared.append(len(calls) > before)
    if forecaster:
        forecaster.detach()
    return clock.times(), np.array(compared)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print and write the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    task = TASKS["gpt2"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randint(64 if options.tiny else 16_384, (1 << 22,))
    data = Data(tokens, tokens, "random", 0, 32 if options.tiny else 1024).to(device)
    training = Training(task, data, 0, tiny=options.tiny)
    block(training, 1, 60)  # compiles
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        for kind, every in KINDS.items():
            found[kind].append(block(training, every, options.steps))
    seconds = {
        kind: float(np.median(np.concatenate([t[~compared] for t, compared in blocks])))
        for kind, blocks in found.items()
    }
    both = [b for kind in ("one in 16", "all") for b in found[kind]]
    compared = np.concatenate([t[compared] for t, compared in both])
    bare = seconds["bare"]
    costs = {
        "step": seconds["one in 16"] / bare - 1,
        "sample": (seconds["all"] - seconds["one in 16"]) / bare,
        "comparison": (float(np.median(compared)) - seconds["all"]) / bare,
        "bare again": seconds["bare again"] / bare - 1,
    }
    costs["without a closure"] = costs["step"] + costs["sample"] / 16
    costs["with a closure"] = costs["without a closure"] + costs["comparison"] / 50
    for name, cost in costs.items():
        print(f"{name}: {cost:+.4f} of a bare step")
    if options.out:
        record = {"bare seconds": bare, "comparisons": len(compared), "costs": costs}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
