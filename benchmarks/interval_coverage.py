"""How often the 95 % interval of a reading contains zero when training is stationary.

    python benchmarks/interval_coverage.py [--windows N] [--out FILE]

Each process is stationary and simulated many times. The rows of a window are made as a monitor
makes them, then merged and judged by the same code, all windows at once. A number is the share of
windows whose interval contains zero; with 4,000 windows its standard error is 0.0034. Columns are
the relaxation time of the slowest mode as a fraction of the window.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from equilibrate._engine.relation.totals import merged
from harness import write
from torch import Tensor

from equilibrate.solvable import Quadratic
from equilibrate.telescoped import spread

STEPS = 12_800
FRACTIONS = (0.001, 0.01, 0.03, 0.1, 0.2, 0.5, 20.0)
HIGHEST = 2.0
"""The largest curvature, at which η h = 1."""


def covered(potential: Tensor, every: int = 1) -> float:
    """Return the share of windows whose interval contains zero.

    Args:
        potential: Φ at the ends of the rows, of shape (rows + 1, windows).
        every: Steps in each row.
    """
    changes = -potential.diff(dim=0)
    counts = torch.full((len(changes), 1), float(every), dtype=torch.float64)
    parts = merged(torch.cat([changes, counts, counts], dim=1), changes.shape[1]).numpy()
    path = np.concatenate([np.zeros((1, parts.shape[1])), parts.cumsum(0)])
    _, margin = spread(path[:, :-1], path[:, -1])
    return float((np.abs(path[-1, :-1]) <= margin).mean())


def quadratic(
    fraction: float, dimension: int, condition: float, distance: float, momentum: float = 0.0
) -> Quadratic:
    """A quadratic whose slowest mode relaxes in a fraction of the window.

    Args:
        fraction: Relaxation time of the slowest mode, in windows.
        dimension: Number of modes.
        condition: Ratio of the largest to the smallest curvature.
        distance: Distance of the minimum from the origin along each mode, in units of the standard
            deviation of the slowest mode.
        momentum: Momentum; the learning rate is lowered by 1 − momentum.
    """
    lr = 0.5 * (1 - momentum)
    slowest = 2 / (fraction * STEPS)
    hessian = torch.logspace(0, math.log10(condition), dimension, dtype=torch.float64) * slowest
    hessian = hessian.clamp(max=HIGHEST)
    noise = torch.ones(dimension, dtype=torch.float64)
    deviation = Quadratic(hessian[:1], noise[:1], lr, momentum).position_covariance.sqrt().item()
    return Quadratic(hessian, noise, lr, momentum, minimum=distance * deviation * noise)


def of_quadratic(model: Quadratic, windows: int, rows: int, generator: torch.Generator) -> float:
    """Return the coverage over windows of a stationary quadratic."""
    every = STEPS // rows
    start = model.stationary(windows, generator)
    states = [start, *model.simulate_thinned(start, rows, every, generator)]
    return covered(torch.stack([model.potential(*state) for state in states]), every)


def of_optimizer(
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    distance: float,
    windows: int,
    generator: torch.Generator,
) -> float:
    """Return the coverage for an optimizer of torch, which treats each window by itself.

    The steps are 2,000 after 4,000 that are not counted, on two modes.
    """
    curvatures, rows, every = torch.tensor([1.0, 0.2]), 125, 16
    theta = torch.nn.Parameter(distance + torch.zeros(windows, 2))
    optimizer = make([theta])
    (group,) = optimizer.param_groups
    norms = []
    for t in range(4000 + rows * every + 1):
        if t >= 4000 and (t - 4000) % every == 0:
            norms.append(theta.detach().double().square().sum(1) / (2 * group["lr"]))
        noise = torch.randn(theta.shape, generator=generator)
        theta.grad = curvatures * (theta.detach() - distance) + noise
        optimizer.step()
    return covered(torch.stack(norms), every)


def of_changing_rates(windows: int, fraction: float, generator: torch.Generator) -> float:
    """Return the coverage if another scheduler sets four learning rates in a window."""
    rows, lrs = 200, (0.5, 0.3, 0.45, 0.25)
    h, distance = 2 / (fraction * STEPS), 1e4
    every = STEPS // rows
    first = Quadratic(torch.tensor([h]), torch.ones(1), lrs[0])
    offset, velocity = first.stationary(windows, generator)
    start = last = offset + distance, velocity
    values = [torch.zeros(windows, dtype=torch.float64)]
    for lr in lrs:
        model = Quadratic(torch.tensor([h]), torch.ones(1), lr, minimum=torch.tensor([distance]))
        before = model.potential(*start)
        for theta, velocity in model.simulate_thinned(start, rows // len(lrs), every, generator):
            after = model.potential(theta, velocity)
            values.append(values[-1] + after - before)
            before, last = after, (theta, velocity)
        start = last
    return covered(torch.stack(values), every)


def of_heavy_tails(windows: int, fraction: float, generator: torch.Generator) -> float:
    """Return the coverage if the noise is Student's with 3 degrees of freedom."""
    steps, rows = 2000, 125
    decay = math.exp(-1 / (fraction * steps)) if fraction < 10 else 1 - 1e-9
    theta = torch.zeros(windows, dtype=torch.float64)
    burn, values = int(min(8 * fraction, 8) * steps), []
    for t in range(burn + steps + 1):
        if t >= burn and (t - burn) % (steps // rows) == 0:
            values.append(theta.square() / 2)
        normal = torch.randn(4, windows, generator=generator, dtype=torch.float64)
        theta = decay * theta + normal[0] / normal[1:].square().mean(0).sqrt()
    return covered(torch.stack(values), steps // rows)


QUADRATICS = {
    "1 mode, minimum at 0": (1, 1.0, 0.0),
    "1 mode, minimum one deviation away": (1, 1.0, 1.0),
    "1 mode, distant minimum": (1, 1.0, 1e3),
    "2 modes": (2, 1.0, 0.0),
    "5 modes": (5, 1.0, 0.0),
    "100 modes": (100, 1.0, 0.0),
    "20 modes, condition 300": (20, 300.0, 0.0),
    "20 modes, condition 300, distant minimum": (20, 300.0, 1e3),
}
OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "RMSprop, momentum 0.9": lambda p: torch.optim.RMSprop(p, lr=2e-3, momentum=0.9),
}


def main() -> None:
    """Measure and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, float]] = {}

    def show(name: str, numbers: dict[str, float]) -> None:
        found[name] = numbers
        print(f"{name:55s}", *(f"{key}: {value:.3f}" for key, value in numbers.items()), flush=True)

    for momentum in (0.0, 0.9):
        for name, (dimension, condition, distance) in QUADRATICS.items():
            numbers = {}
            for fraction in FRACTIONS:
                if dimension == 100 and fraction not in (0.01, 0.1):
                    continue
                model = quadratic(fraction, dimension, condition, distance, momentum)
                numbers[f"{fraction:g}"] = of_quadratic(
                    model, options.windows, options.rows, generator
                )
            show(f"{name}, μ = {momentum:g}", numbers)
    for name, make in OPTIMIZERS.items():
        for distance in (0.0, 10.0):
            numbers = {"": of_optimizer(make, distance, options.windows, generator)}
            show(f"{name}, minimum at {distance:g}", numbers)
    for name, function in {
        "four learning rates in a window": of_changing_rates,
        "heavy-tailed noise, 1 mode": of_heavy_tails,
    }.items():
        few = (0.01, 0.1)
        show(name, {f"{f:g}": function(options.windows, f, generator) for f in few})
    if options.out:
        write(options.out, found)


if __name__ == "__main__":
    main()
