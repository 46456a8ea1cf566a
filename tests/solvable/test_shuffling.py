"""The epoch-end factor against rational arithmetic, enumeration of all orders, and simulation."""

import itertools
import math
from collections import deque
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.solvable_oracles import assert_close, seeded

from equilibrate.solvable import Quadratic, epoch_end_factor, simulate_reshuffled


def published_factor(rate: Fraction, batches: int) -> float:
    r, m = 1 - rate, batches
    bracket = 1 - (1 + r) / (1 - r) * (1 - r**m) / (m * (1 + r**m))
    return float(Fraction(m, m - 1) * bracket)


@pytest.mark.parametrize("batches", [2, 3, 10, 101])
@pytest.mark.parametrize("rate", ["1e-12", "1e-6", "0.001", "0.3", "1", "1.7", "1.999"])
def test_epoch_end_factor_equals_rational_arithmetic(rate, batches):
    exact = published_factor(Fraction(rate), batches)
    assert epoch_end_factor(float(rate), batches).item() == pytest.approx(exact, rel=1e-12, abs=0)


@pytest.mark.parametrize("rate", [0.01, 0.4, 1.3])
@pytest.mark.parametrize("batches", [2, 3, 5])
def test_epoch_end_factor_equals_enumeration_of_all_orders(rate, batches):
    """Variance at epoch ends, averaged over all M! orders, relative to independent batches."""
    noise = np.random.default_rng(0).normal(size=batches)
    noise -= noise.mean()
    r = 1 - rate
    displacements = [
        sum(r ** (batches - 1 - k) * x for k, x in enumerate(order))
        for order in itertools.permutations(noise)
    ]
    shuffled = np.mean(np.square(displacements)) / (1 - r ** (2 * batches))
    independent = np.mean(np.square(noise)) / (1 - r**2)
    assert epoch_end_factor(rate, batches).item() == pytest.approx(
        shuffled / independent, rel=1e-10, abs=0
    )


def test_limits_of_the_epoch_end_factor():
    m = 1000
    x = torch.tensor([0.01, 1.0, 10.0], dtype=torch.float64)
    continuum = 1 - torch.tanh(x / 2) / (x / 2)
    torch.testing.assert_close(epoch_end_factor(x / m, m), continuum, rtol=0.01, atol=0)
    tiny = 1e-9
    assert epoch_end_factor(tiny, m).item() == pytest.approx(
        m * (m + 1) * tiny**2 / 12, rel=1e-5, abs=0
    )
    assert epoch_end_factor(0.0, m).item() == 0
    assert epoch_end_factor(1.0, m).item() == pytest.approx(1, rel=1e-12, abs=0)


@pytest.mark.slow
def test_reshuffled_simulation_agrees_with_the_epoch_end_factor():
    """Six modes with Mηh from 0.01 to 10, within z = 4.5: false alarms for 4 of 10^5 seeds."""
    batches, replicas, epochs = 20, 5_000, 600
    rates = torch.tensor([0.01, 0.1, 0.3, 1.0, 3.0, 10.0]).double() / batches
    model = Quadratic(rates, torch.ones(6), lr=1.0)
    zeros = torch.zeros(replicas, 6).double()
    steps = simulate_reshuffled(model, (zeros, zeros), batches, epochs, seeded())
    [last] = deque(steps, maxlen=1)  # a list of all steps would take gigabytes
    squares = last.parameters_after.square()
    exact = epoch_end_factor(rates, batches) * model.position_covariance.diag()
    error = squares.std(0) / math.sqrt(replicas)
    assert ((squares.mean(0) - exact).abs() < 4.5 * error).all()
    assert (error < 0.025 * exact).all()


def test_reshuffled_noise_sums_to_zero_and_has_the_given_covariance():
    hessian = torch.tensor([[1.0, 0.4, 0.0], [0.4, 0.8, 0.1], [0.0, 0.1, 0.2]])
    noise = torch.tensor([[1.0, -0.3, 0.2], [-0.3, 0.6, 0.0], [0.2, 0.0, 0.4]])
    model = Quadratic(hessian, noise, lr=0.5, minimum=torch.ones(3))
    start = model.stationary(4, seeded())
    steps = list(simulate_reshuffled(model, start, batches=7, epochs=2, generator=seeded()))
    for epoch in (steps[:7], steps[7:]):
        drawn = torch.stack([s.gradient - model.full_gradient(s.parameters) for s in epoch], dim=1)
        assert drawn.sum(1).abs().max() < 1e-12
        assert_close(drawn.mT @ drawn / 7, model.noise.expand(4, 3, 3), rtol=1e-12)
    first = steps[0].gradient - model.full_gradient(steps[0].parameters)
    assert len(first.unique(dim=0)) > 1  # each replica has its own order


def test_shuffling_rejects_invalid_arguments():
    with pytest.raises(ValueError, match=r"rate = lr \* curvature must lie in \[0, 2\), got 2.0"):
        epoch_end_factor(2.0, 10)
    with pytest.raises(ValueError, match="batches must be at least 2, got 1"):
        epoch_end_factor(0.1, 1)
    model = Quadratic(torch.ones(3), torch.ones(3), lr=0.1)
    with pytest.raises(ValueError, match=r"batches must exceed the dimension 3.* got 3"):
        next(simulate_reshuffled(model, model.stationary(1, seeded()), 3, 1, seeded()))
