"""When `rules.Gain` acts on quadratics whose progress is known, relative to when it should.

Many replicas of SGD run with fast modes, which make up the noise N, and slow ones that start away
from the minimum and make progress. The rule is asked at the end of each epoch. It should act as
soon as N exceeds sT, with s the true fall of the mean loss in a step and T the number of steps so
far. A run that acts before is early.

    python benchmarks/gain_rule.py [--runs 100] [--out FILE]
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from equilibrate.gains import Forecast, Losses, average
from equilibrate.rules import Gain
from torch import Tensor

import equilibrate as eq
from equilibrate.solvable import Quadratic, exponential_match, lagged_excess

OUT = Path(__file__).parent / "results" / "gain_rule.json"
HORIZON, EVERY, LR = 400, 16, 0.5
FAST = torch.logspace(-1.5, 0, 40, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """Slow modes: their curvatures, and the excess loss of each at the beginning."""

    curvatures: Tensor
    energies: Tensor
    steps: int
    epoch: int


def floor(time: float, epoch: int, steps: int = 12_000) -> Case:
    """Progress that ends: the loss of one mode decays as exp(−t/time)."""
    one = torch.ones(1, dtype=torch.float64)
    return Case(one / (2 * LR * time), 20 * one, steps, epoch)


def power(energy: float, epoch: int, steps: int = 24_000) -> Case:
    """Progress that does not end: the loss falls about as t^−0.4."""
    curvatures = torch.logspace(-5, -1, 60, dtype=torch.float64)
    weights = curvatures**0.4
    return Case(curvatures, energy * weights / weights.sum(), steps, epoch)


CASES = {
    "floor, 50 steps, epochs of 100": floor(50, 100),
    "floor, 200 steps, epochs of 100": floor(200, 100),
    "floor, 200 steps, epochs of 400": floor(200, 400),
    "floor, 1000 steps, epochs of 100": floor(1000, 100),
    "floor, 1000 steps, epochs of 400": floor(1000, 400),
    "power law, 5 times the noise": power(5, 400),
    "power law, 20 times the noise": power(20, 400),
}


def run(case: Case, runs: int) -> dict[str, float]:
    """Simulate one case and return when the rule should act and when it did."""
    noise = torch.cat([torch.full_like(FAST, 0.2), torch.full_like(case.curvatures, 1e-5)])
    model = Quadratic(torch.cat([FAST, case.curvatures]), noise, LR)
    unit = model.excess_loss
    generator = torch.Generator().manual_seed(0)
    theta, velocity = model.stationary(runs, generator)
    theta[:, len(FAST) :] += (2 * unit * case.energies / case.curvatures).sqrt()
    match = exponential_match(HORIZON, EVERY)
    b = 2 ** (-EVERY / match.half_life)
    losses, samples, mean, count = [], [], theta.clone(), 0
    for t, snapshot in enumerate(model.simulate((theta, velocity), case.steps, generator)):
        jitter = torch.randn(runs, generator=generator, dtype=torch.float64)
        losses.append(model.loss(snapshot.parameters) + unit * jitter)  # of one mini-batch
        if t % EVERY == 0:
            count += 1
            difference = snapshot.parameters - mean
            samples.append(match.factor / 2 * (difference * snapshot.gradient).sum(-1))
            mean = mean + difference * (1 - b) / (1 - b**count)
    t = torch.arange(1, case.steps, dtype=torch.float64)[:, None]
    rates = 2 * LR * case.curvatures
    falls = (rates * unit * case.energies * torch.exp(-rates * t)).sum(1)
    gain = match.factor * lagged_excess(model, match.half_life, EVERY)
    due = int((falls * t[:, 0] > gain).nonzero()[-1]) + 2
    series = zip(torch.stack(losses).T.numpy(), torch.stack(samples).T.numpy(), strict=True)
    acted = np.array([_acted(*each, case.epoch) for each in series])
    return {
        "runs": runs,
        "due": due,
        "early": float(np.mean(acted < due)),
        "never": float(np.mean(np.isinf(acted))),
        "median": float(np.median(acted)),
        "first": float(acted.min()),
    }


def _acted(losses: np.ndarray, samples: np.ndarray, epoch: int) -> float:
    """Return the step after which the rule acts in one run; inf if it does not."""
    means = losses[: len(losses) // epoch * epoch].reshape(-1, epoch).mean(1)
    rule = Gain()
    for k in range(1, len(means) + 1):
        t = k * epoch
        if t < HORIZON + 8 * EVERY:
            continue
        first = max(HORIZON, t // 2, t - 8 * HORIZON)
        chosen = samples[math.ceil(first / EVERY) : math.ceil(t / EVERY)]
        forecast = Forecast(HORIZON, average(chosen.tolist()), t)
        history = Losses(0, tuple(range(epoch, t + 1, epoch)), tuple(means[:k].tolist()))
        reading = eq.Reading(t, 1, 1.0, 1.0, LR, forecasts=(forecast,), losses=history)
        if rule.judge(reading).act:
            return float(t)
    return math.inf


def main() -> None:
    """Run all cases, print and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    print("| | due after | acted, median | first | early | never |\n|" + " --- |" * 6)
    for name, case in CASES.items():
        found[name] = result = run(case, options.runs)
        numbers = [result["due"], result["median"], result["first"]]
        shares = [f"{100 * result[key]:.0f} %" for key in ("early", "never")]
        cells = [name, *(f"{x:.0f}" for x in numbers), *shares]
        print(f"| {' | '.join(cells)} |", flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
