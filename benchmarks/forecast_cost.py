"""The cost of forecasts in a step of GPT-2 124M, compiled and in bfloat16, relative to a bare one.

    python benchmarks/forecast_cost.py [--rounds 3] [--steps 100] [--out FILE] [--tiny]

Blocks of steps with nothing, with a `Cooldown` in its constant phase, with one that also compares
losses at averaged weights, and with nothing again follow each other in turn. A block holds two
comparisons. Ratios are those to the bare block of the same round.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from forecast_tasks import TASKS, Data, Training

import equilibrate as eq


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print and write the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    task = TASKS["gpt2"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randint(64 if options.tiny else 16_384, (1 << 22,))
    data = Data(tokens, tokens, "random", 0, 32 if options.tiny else 1024).to(device)
    training = Training(task, data, 0, tiny=options.tiny)

    def value(step: int) -> torch.Tensor:
        return training.loss(*training.batch(step))

    def seconds(kind: str) -> float:
        scheduler = None
        if kind.startswith("Cooldown"):
            scheduler = eq.Cooldown(training.optimizer, total_steps=10**6)
        begun = 0.0
        for k in range(options.steps + 20):
            if k == 20:
                _synchronize()
                begun = time.perf_counter()
            again = partial(value, training.step) if "values" in kind else None
            loss = training.train(6e-4)
            if scheduler is not None:
                scheduler.step(loss, again)
        _synchronize()
        if scheduler is not None:
            scheduler.detach()
        return (time.perf_counter() - begun) / options.steps

    seconds("Cooldown, values")  # compiles
    kinds = ["bare", "Cooldown", "Cooldown, values", "bare again"]
    rounds = [{kind: seconds(kind) for kind in kinds} for _ in range(options.rounds)]
    ratios = {
        kind: [found[kind] / found["bare"] for found in rounds] for kind in kinds if kind != "bare"
    }
    for kind, found in ratios.items():
        print(f"{kind}: {statistics.median(found):.4f} ({min(found):.4f} to {max(found):.4f})")
    if options.out:
        bare = statistics.median(found["bare"] for found in rounds)
        options.out.write_text(json.dumps({"bare seconds": bare, "ratios": ratios}, indent=1))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
