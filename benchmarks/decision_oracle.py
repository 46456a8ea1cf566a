"""A rule that is told the model, a reference for `decision_limits.py` in one and two dimensions.

The oracle is told what no rule of the library knows: the axes of the quadratic, that each axis is
an autoregressive process of order one, and the variance of its noise. It has to find the rate and
the centre of each axis from the trace, with a prior that is flat in the logarithm of the rate and
in the product of rate and centre. It acts when the posterior probability of τ > 0.05 is below a
bound.
"""

from typing import Any

import numpy as np
import torch
from decision_processes import EARLY, Array, Run, stride
from decision_rules import Fired

BOUNDS = (
    *(0.3, 0.2, 0.14, 0.1, 0.07, 0.05, 0.03, 0.02, 0.014),
    *(0.01, 0.007, 0.005, 0.003, 0.002, 0.001, 0.0005),
)
"""Posterior probabilities below which the oracle acts, from lenient to strict."""
_RELAXATIONS = np.geomspace(0.05, 100, 160)
"""Relaxations of an axis in the length of the trace: the grid of the posterior."""
_DRAWS = 24
"""Draws of what the second axis contributes to τ."""


def probability(run: Run, epoch: int, rows: Any, rng: np.random.Generator) -> Array:
    """Return the posterior probability of τ > 0.05 at the end of an epoch."""
    x, _ = run.trace(epoch, rows)
    n, apart = x.shape[1] - 1, int(run.epochs[stride(epoch)])
    axes = [_posterior(x[:, :, i] - x[:, :1, i], n, apart) for i in range(x.shape[2])]
    weights, centre, width, variance = axes[0]
    left = np.exp(2 * _RELAXATIONS)
    others = np.zeros((len(x), 1)) if len(axes) == 1 else _contribution(axes[1], rng)
    found = np.zeros(len(x))
    for other in others.T:  # of this axis (centre² − σ²)·e^(−2κ)/σ², averaged over the axes
        bound = len(axes) * EARLY - other[:, None]
        distance = np.sqrt(np.maximum(variance * (1 + bound * left), 0))
        beyond = _cdf((centre - distance) / width) + _cdf((-centre - distance) / width)
        found += (weights * beyond).sum(1)
    return found / others.shape[1]


def oracle(run: Run, seed: int) -> list[Fired]:
    """Return the first epoch at which the oracle acts, for each of the bounds."""
    rng = np.random.default_rng(seed)
    fired = np.full((len(BOUNDS), len(run.norm)), -1)
    for epoch in range(1, len(run.epochs)):
        step = int(run.epochs[epoch])
        rows = np.flatnonzero((fired < 0).any(0))
        late = step > 25 * run.process.relaxation and epoch % 2  # look less often
        if late or epoch // stride(epoch) < 8 or not len(rows):
            continue
        found = probability(run, epoch, rows, rng)
        for bound, mine in zip(BOUNDS, fired, strict=True):
            mine[rows[(found < bound) & (mine[rows] < 0)]] = epoch
    return list(fired)


def _posterior(y: Array, n: int, apart: int) -> tuple[Array, Array, Array, Array]:
    """Return weights of the grid, and centre, its width and σ² at each of its points.

    Positions are in units in which a step of noise has the variance 1/2.
    """
    a, b = y[:, :-1], y[:, 1:]
    keep = np.exp(-_RELAXATIONS / n)
    variance = 0.5 / (1 - keep ** (2 / apart))
    noise = variance * (1 - keep**2)
    first, second = a.mean(1)[:, None], b.mean(1)[:, None]
    products = [(p * q).mean(1)[:, None] for p, q in ((a, a), (a, b), (b, b))]
    mean = second - keep * first
    residual = products[2] - 2 * keep * products[1] + keep**2 * products[0] - mean**2
    logarithm = -n / 2 * residual / noise - (n - 1) / 2 * np.log(noise)
    weights = np.exp(logarithm - logarithm.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return weights, mean / (1 - keep), np.sqrt(noise / n) / (1 - keep), variance


def _contribution(axis: tuple[Array, Array, Array, Array], rng: np.random.Generator) -> Array:
    """Return draws of (centre² − σ²)·e^(−2κ)/σ² of an axis, of shape (repetitions, draws)."""
    weights, centre, width, variance = axis
    shape = (len(weights), _DRAWS)
    index = (weights.cumsum(1)[:, None] < rng.random(shape)[..., None]).sum(2)
    index = np.minimum(index, len(_RELAXATIONS) - 1)
    place = np.take_along_axis(centre, index, 1) + width[index] * rng.standard_normal(shape)
    return (place**2 / variance[index] - 1) * np.exp(-2 * _RELAXATIONS[index])


def _cdf(x: Array) -> Array:
    return torch.special.ndtr(torch.from_numpy(x)).numpy()
