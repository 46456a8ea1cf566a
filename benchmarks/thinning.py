"""What is lost by measuring only every k-th step: almost nothing, if the difference telescopes.

SGD on a quadratic loss with gradient noise and a minimum away from the origin, started in its
stationary state, where both sides of FDR1 are equal. The reading is averaged over the later half of
4,000 steps, in 256 independent repetitions. Its residual left/right − 1 should be zero; the scatter
over repetitions is its error. Two ways to measure every k-th step are compared on the same runs:

- `Monitor(every=k)`: the difference of the two sides from the norms at both ends, which is exact;
- sampling both sides: the means of θ·g and of (η/2)g² at every k-th step.

Each repetition is one parameter tensor of a single optimizer, with a reading of its own, because
FDR1 holds for each parameter.

    python benchmarks/thinning.py [--repetitions N] [--steps N] [--out FILE] [--figure FILE]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from harness import write
from torch import Tensor, nn

import equilibrate as eq

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "thinning.json"
FIGURE = ROOT / "docs" / "figures" / "thinning.png"
LR, DIMENSIONS, MINIMUM = 0.1, 10, 0.5
CURVATURES = torch.logspace(-1, 0, DIMENSIONS)
INTERVALS = (1, 5, 10, 20, 50, 100)


def simulate(repetitions: int, steps: int) -> dict[str, dict[int, float]]:
    """Return the scatter of the residual by method and interval."""
    generator = torch.Generator().manual_seed(0)
    # Each row of `theta` is the storage of one parameter tensor.
    spread = (LR / (CURVATURES * (2 - LR * CURVATURES))).sqrt()
    theta = MINIMUM + spread * torch.randn(repetitions, DIMENSIONS, generator=generator)
    params = {f"repetition {i}": nn.Parameter(row) for i, row in enumerate(theta)}
    optimizer = torch.optim.SGD(params.values(), lr=LR)
    monitors = {k: eq.Monitor(optimizer, named_parameters=params, every=k) for k in INTERVALS}
    lefts, rights = torch.zeros(2, steps, repetitions, dtype=torch.float64)
    for t in range(steps):
        noise = torch.randn(repetitions, DIMENSIONS, generator=generator)
        gradient = CURVATURES * (theta - MINIMUM) + noise
        lefts[t] = (theta * gradient).sum(1)
        rights[t] = LR / 2 * gradient.square().sum(1)
        for p, g in zip(params.values(), gradient, strict=True):
            p.grad = g
        optimizer.step()
    telescoped = {
        k: [r.residual for r in m.parameter_readings().values()] for k, m in monitors.items()
    }
    sampled = {k: both_sides_sampled(lefts, rights, k) for k in INTERVALS}
    return {
        "monitor": {k: scatter(torch.tensor(r)) for k, r in telescoped.items()},
        "both_sides_sampled": {k: scatter(r) for k, r in sampled.items()},
    }


def both_sides_sampled(lefts: Tensor, rights: Tensor, every: int) -> Tensor:
    """Return the residual from the samples of both sides at every k-th step of the later half."""
    half = slice(len(lefts) // 2 + every - 1, None, every)
    return lefts[half].mean(0) / rights[half].mean(0) - 1


def scatter(residuals: Tensor) -> float:
    """Return the root mean square of residuals, whose expected value is zero."""
    return residuals.square().mean().sqrt().item()


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the scatter against the interval."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    labels = {"both_sides_sampled": "both sides sampled", "monitor": "Monitor(every=k)"}
    for (name, label), marker in zip(labels.items(), "so", strict=True):
        scatters = results["scatter"][name]
        axes.plot([int(k) for k in scatters], list(scatters.values()), marker=marker, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured every k-th step",
        ylabel="error of the residual (RMS)",
        title=f"FDR1 in the stationary state, {results['steps']:,} steps",
    )
    axes.set_xticks(INTERVALS, [str(k) for k in INTERVALS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Simulate, print, write and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {
        "repetitions": options.repetitions,
        "steps": options.steps,
        "lr": LR,
        "curvatures": CURVATURES.tolist(),
        "minimum": MINIMUM,
        "scatter": simulate(options.repetitions, options.steps),
    }
    print(f"{'k':>4} {'both sides sampled':>20} {'Monitor(every=k)':>20}")
    for k in INTERVALS:
        sampled, monitor = (
            results["scatter"][name][k] for name in ("both_sides_sampled", "monitor")
        )
        print(f"{k:4} {sampled:20.4f} {monitor:20.4f}")
    write(options.out, results)
    draw(json.loads(options.out.read_text())["results"], options.figure)
    print(f"written to {options.out} and {options.figure}")


if __name__ == "__main__":
    main()
