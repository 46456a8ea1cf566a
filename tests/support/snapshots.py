"""Snapshots of solvable SGD: simulated ones, and points whose mean is the stationary mean."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from equilibrate.observables import Snapshot
from equilibrate.solvable import LinearRegression, Quadratic, SolvableSGD

HESSIAN = torch.tensor([[1.0, 0.4, 0.0], [0.4, 0.8, 0.1], [0.0, 0.1, 0.2]]).double()
NOISE = torch.tensor([[1.0, -0.3, 0.2], [-0.3, 0.6, 0.0], [0.2, 0.0, 0.4]]).double()
MINIMUM = torch.tensor([1.0, -2.0, 0.5]).double()

MODELS: dict[str, SolvableSGD] = {
    "plain": Quadratic(HESSIAN, NOISE, lr=0.8, minimum=MINIMUM),
    "dampening alone": Quadratic(HESSIAN, NOISE, lr=0.8, dampening=0.3, minimum=MINIMUM),
    "momentum": Quadratic(HESSIAN, NOISE, lr=1.0, momentum=0.8, minimum=MINIMUM),
    "dampening": Quadratic(HESSIAN, NOISE, lr=1.5, momentum=0.7, dampening=0.6, minimum=MINIMUM),
    "regression": LinearRegression(HESSIAN, 0.5, batch_size=6, lr=0.5, solution=MINIMUM),
    "regression, dampening": LinearRegression(
        HESSIAN, 0.5, batch_size=6, lr=0.6, momentum=0.6, dampening=0.4, solution=MINIMUM
    ),
}


def exact(model: SolvableSGD) -> Snapshot:
    """Points with the exact mean and covariance of (θ, v, noise) and without odd moments.

    The covariance of ±√n times the columns of a root of an n×n matrix is this matrix. So the mean
    of an observable of second order, or of third order for a symmetric distribution, is exact.
    """
    blocks = torch.block_diag(model.state_covariance, model.noise)
    values, basis = torch.linalg.eigh(blocks)
    columns = math.sqrt(len(blocks)) * (basis * values.clamp(min=0).sqrt()).T
    points = torch.cat([columns, -columns])
    position, velocity, noise = points.split(len(model.hessian), dim=1)
    position = position + model.minimum
    return model.step(position, velocity, model.full_gradient(position) + noise)


def simulated(
    model: SolvableSGD, steps: int, replicas: int, generator: torch.Generator
) -> Iterator[Snapshot]:
    """A run that starts in the stationary state."""
    return model.simulate(model.stationary(replicas, generator), steps, generator)
