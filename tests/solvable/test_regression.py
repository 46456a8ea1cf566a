"""Linear regression against the map of its second moments and the published covariance."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.solvable_oracles import (
    assert_close,
    dampenings,
    gradient_gain,
    matrices,
    momenta,
    naive_transition,
    regressions,
    seeded,
)

from equilibrate.solvable import LinearRegression, Quadratic


def second_moment_operator(design, batch_size, lr, mu, nu) -> np.ndarray:
    """The map of ⟨zzᵀ⟩, z = (θ−θ*, v), over one step of noiseless-label regression, as a matrix."""
    probe = Quadratic(design, design, 1e-9, mu, nu)
    object.__setattr__(probe, "lr", lr)  # also for unstable rates, which the constructor rejects
    d, a = len(design), design.numpy()
    transition, gain = naive_transition(probe), gradient_gain(probe)

    def propagate(moment):
        xx = moment[:d, :d]
        noise = (a @ xx @ a + np.trace(a @ xx) * a) / batch_size
        return transition @ moment @ transition.T + gain @ noise @ gain.T

    units = np.eye(4 * d * d).reshape(-1, 2 * d, 2 * d)
    return np.stack([propagate(unit).ravel() for unit in units], axis=1)


@given(matrices(2), st.integers(1, 5), st.floats(0.1, 1.0), momenta, dampenings)
def test_regression_requires_a_stable_mean_square(design, batch_size, size, mu, nu):
    lr = size * 2 * (1 + mu) / ((1 - nu) * torch.linalg.eigvalsh(design).max().item())
    operator = second_moment_operator(design, batch_size, lr, mu, nu)
    radius = np.abs(np.linalg.eigvals(operator)).max()
    assume(abs(radius - 1) > 1e-6)
    if radius > 1:
        with pytest.raises(ValueError, match="mean square of SGD diverge"):
            LinearRegression(design, 1.0, batch_size, lr, mu, nu)
        return
    model = LinearRegression(design, 1.0, batch_size, lr, mu, nu)
    forcing = gradient_gain(model) @ design.numpy() @ gradient_gain(model).T / batch_size
    moment = np.linalg.solve(np.eye(len(operator)) - operator, forcing.ravel())
    assert_close(model.state_covariance.ravel(), moment, rtol=1e-8 / (1 - radius))


@given(regressions())
def test_regression_has_the_published_covariance(model):
    a, mu, size = model.design, model.momentum, model.batch_size
    alpha, one = model.lr * (1 - model.dampening), torch.eye(len(model.design)).double()
    g = 2 * (1 - mu) * one - ((1 - mu) / (1 + mu) + 1 / size) * alpha * a
    overlap = (alpha * a @ torch.linalg.inv(g)).trace()
    kappa = overlap / (1 - overlap / size)
    sigma = model.label_noise / size * (1 + kappa / size) * alpha * torch.linalg.inv(g)
    noise = (a @ sigma @ a + (a @ sigma).trace() * a + model.label_noise * a) / size
    assert_close(model.position_covariance, sigma, rtol=1e-10)
    assert_close(model.noise, noise, rtol=1e-10)


def test_gradient_has_the_mean_and_covariance_of_mini_batches():
    """20 entries within z = 5: false alarms for 1 of 10^5 seeds."""
    design = torch.tensor([[1.0, 0.3], [0.3, 0.5]]).double()
    model = LinearRegression(design, 0.7, batch_size=3, lr=0.1, solution=torch.tensor([1.0, -1.0]))
    theta = torch.tensor([[2.0, 0.0], [0.5, -3.0]]).double()
    draws = model.gradient(theta.expand(200_000, 2, 2), seeded())
    for row, samples in zip(theta, draws.unbind(1), strict=True):
        mean = design @ (row - model.minimum)
        spread = (row - model.minimum) @ mean * design + 0.7 * design
        noise = (torch.outer(mean, mean) + spread) / 3
        centred = samples - mean
        for observed, exact in [
            (samples, mean),
            (centred[:, :, None] * centred[:, None, :], noise),
        ]:
            error = observed.std(0) / math.sqrt(len(observed))
            assert ((observed.mean(0) - exact).abs() < 5 * error).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_noise": -1.0}, "label_noise must be a variance.* got -1.0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"design": torch.tensor([1.0, -1.0])}, "design must be positive definite, got .* -1;"),
        ({"solution": torch.ones(1)}, r"solution must have shape \(2,\), got \(1,\)"),
        ({"lr": 0.5}, "lr = 0.5 makes the mean square of SGD diverge with mini-batches of 1;"),
    ],
)
def test_regression_rejects_invalid_arguments(arguments, message):
    good = {"design": torch.ones(2), "label_noise": 1.0, "batch_size": 1, "lr": 0.1}
    with pytest.raises(ValueError, match=message):
        LinearRegression(**(good | arguments))
