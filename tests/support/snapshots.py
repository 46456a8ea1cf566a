"""Snapshots of solvable SGD: exact ones, whose plain mean is the stationary mean, and simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from equilibrate.observables import Snapshot
from equilibrate.solvable import LinearRegression, Quadratic, SolvableSGD, State

HESSIAN = torch.tensor([[1.0, 0.4, 0.0], [0.4, 0.8, 0.1], [0.0, 0.1, 0.2]]).double()
NOISE = torch.tensor([[1.0, -0.3, 0.2], [-0.3, 0.6, 0.0], [0.2, 0.0, 0.4]]).double()
MINIMUM = torch.tensor([1.0, -2.0, 0.5]).double()

MODELS: dict[str, SolvableSGD] = {
    "plain": Quadratic(HESSIAN, NOISE, lr=0.8, minimum=MINIMUM),
    "dampening alone": Quadratic(HESSIAN, NOISE, lr=0.8, dampening=0.3, minimum=MINIMUM),
    "momentum": Quadratic(HESSIAN, NOISE, lr=1.0, momentum=0.8, minimum=MINIMUM),
    "dampening": Quadratic(HESSIAN, NOISE, lr=1.5, momentum=0.7, dampening=0.6, minimum=MINIMUM),
    "regression": LinearRegression(HESSIAN, 0.5, batch=6, lr=0.5, solution=MINIMUM),
    "regression, dampening": LinearRegression(
        HESSIAN, 0.5, batch=6, lr=0.6, momentum=0.6, dampening=0.4, solution=MINIMUM
    ),
}


def snapshot(model: SolvableSGD, position: Tensor, velocity: Tensor, gradient: Tensor) -> Snapshot:
    step = model.step(State(position, velocity), gradient)
    return Snapshot(
        step.position,
        step.gradient,
        step.next_velocity,
        model.lr,
        model.momentum,
        model.dampening,
        velocity_before=step.velocity,
    )


def exact(model: SolvableSGD) -> Snapshot:
    """Points with the exact mean and covariance of (θ, v, noise) and no odd moments about it.

    ±√n times the columns of a root of an n×n covariance have it as theirs. So the mean of any
    observable that is quadratic, or cubic with a symmetric law, is its stationary average.
    """
    blocks = torch.block_diag(model.state_covariance, model.noise)
    values, basis = torch.linalg.eigh(blocks)
    columns = math.sqrt(len(blocks)) * (basis * values.clamp(min=0).sqrt()).T
    points = torch.cat([columns, -columns])
    position, velocity, noise = points.split(len(model.hessian), dim=1)
    position = position + model.minimum
    return snapshot(model, position, velocity, model.full_gradient(position) + noise)


def simulated(
    model: SolvableSGD, steps: int, replicas: int, generator: torch.Generator
) -> Iterator[Snapshot]:
    start = model.stationary(replicas, generator)
    for step in model.simulate(start, steps, generator):
        yield snapshot(model, step.position, step.velocity, step.gradient)
