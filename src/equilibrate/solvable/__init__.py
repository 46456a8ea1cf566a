"""Exactly solvable SGD: the reference for tests and documentation.

On a quadratic loss the update v′ = μv − (1−ν)g, θ′ = θ + ηv′ is linear, so every stationary average
of second order is known in closed form, at any learning rate. `Quadratic` has noise of constant
covariance. `LinearRegression` has the noise of real mini-batches, which depends on θ. Both have the
same averages and the same simulator (`SolvableSGD`), which yields `observables.Snapshot`s.

Example:
    >>> import torch
    >>> model = Quadratic(torch.tensor([1.0, 0.1]), noise=torch.ones(2), lr=0.5, momentum=0.5)
    >>> abs(model.fdr1_left / model.fdr1_right - 1) < 1e-12
    True
    >>> abs(model.fdr2_left / model.fdr2_right - 1) < 1e-12
    True

    The simulator yields snapshots, which a relation can measure directly:

    >>> from equilibrate import relations
    >>> generator = torch.Generator().manual_seed(0)
    >>> start = model.stationary(replicas=1, generator=generator)
    >>> snapshots = model.simulate(start, steps=1000, generator=generator)
    >>> relations.fdr1().measure(snapshots).holds
    True
"""

from equilibrate.solvable.base import SolvableSGD
from equilibrate.solvable.cooldown import (
    cooldown_gain,
    lagged_excess,
    linear_cooldown,
)
from equilibrate.solvable.quadratic import Quadratic, SDEPrediction
from equilibrate.solvable.regression import LinearRegression
from equilibrate.solvable.shuffling import epoch_end_factor, simulate_reshuffled

__all__ = [
    "LinearRegression",
    "Quadratic",
    "SDEPrediction",
    "SolvableSGD",
    "cooldown_gain",
    "epoch_end_factor",
    "lagged_excess",
    "linear_cooldown",
    "simulate_reshuffled",
]
