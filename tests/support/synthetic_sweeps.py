"""Sweeps with a known G(η)."""

import torch

from equilibrate.landscape import Sweep, SweepPoint

CURVATURE, NOISE = 3.0, 2.0


def synthetic(
    bend: float = 0.0, spread: float = 0.02, seed: int = 0, seeds: int = 6, **settings
) -> Sweep:
    """A sweep with G = (η/2)·h·Tr C̃·(1 + bend·η) and a relative spread among seeds."""
    draw = torch.Generator().manual_seed(seed)
    points = []
    for lr in (0.01, 0.02, 0.05, 0.1):
        scatter = 1 + spread * torch.randn(seeds, generator=draw, dtype=torch.float64)
        g = lr / 2 * CURVATURE * NOISE * (1 + bend * lr) * scatter
        points.append(SweepPoint(lr, tuple(g.tolist()), (NOISE,) * seeds, 0.0, 10, 10, True))
    values = {
        "momentum": 0.0, "dampening": 0.0, "sampling": "independent", "steps_per_epoch": 50,
        "threshold": 0.02, **settings,
    }  # fmt: skip
    return Sweep(tuple(points), **values)
