"""Exactly solvable SGD: the ground truth of tests, docs and README.

On a quadratic loss the update v′ = μv − (1−ν)g, θ′ = θ + ηv′ is linear, so every stationary average
of two factors is known in closed form, at any learning rate and not only at a small one.
`Quadratic` has noise of constant covariance; `LinearRegression` has the noise of true mini-batches,
which depends on θ. Both offer the same averages and the same simulator (`SolvableSGD`).

>>> import torch
>>> model = Quadratic(torch.tensor([1.0, 0.1]), noise=torch.ones(2), lr=0.5, momentum=0.5)
>>> abs(model.left / model.right - 1) < 1e-12  # FDR1′
True
>>> abs(model.second_left / model.second_right - 1) < 1e-12  # FDR2
True
"""

from equilibrate.solvable.base import SolvableSGD, State, Step
from equilibrate.solvable.quadratic import Quadratic, SDEPrediction
from equilibrate.solvable.regression import LinearRegression
from equilibrate.solvable.shuffling import epoch_end_factor, simulate_reshuffled

__all__ = [
    "LinearRegression",
    "Quadratic",
    "SDEPrediction",
    "SolvableSGD",
    "State",
    "Step",
    "epoch_end_factor",
    "simulate_reshuffled",
]
