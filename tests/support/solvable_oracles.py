"""Random solvable models, and naive matrices to check them against."""

import numpy as np
import torch
from hypothesis import strategies as st

from equilibrate.solvable import LinearRegression, Quadratic, SolvableSGD

momenta = st.floats(0, 0.98)
dampenings = st.floats(0, 0.95)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def matrices(draw, dimension: int):
    """Random symmetric positive definite matrices with eigenvalues between 0.01 and 10."""
    exponents = draw(st.lists(st.floats(-2, 1), min_size=dimension, max_size=dimension))
    seed = draw(st.integers(0, 2**16))
    square = torch.randn(dimension, dimension, dtype=torch.float64, generator=seeded(seed))
    basis = torch.linalg.qr(square).Q
    return (basis * 10.0 ** torch.tensor(exponents, dtype=torch.float64)) @ basis.T


@st.composite
def quadratics(draw, momentum=momenta, dampening=dampenings):
    dimension = draw(st.integers(1, 4))
    hessian, noise = draw(matrices(dimension)), draw(matrices(dimension))
    mu, nu = draw(momentum), draw(dampening)
    bound = 2 * (1 + mu) / ((1 - nu) * torch.linalg.eigvalsh(hessian).max().item())
    minimum = torch.linspace(-1, 2, dimension, dtype=torch.float64)
    return Quadratic(hessian, noise, draw(st.floats(0.01, 0.95)) * bound, mu, nu, minimum)


@st.composite
def regressions(draw, momentum=momenta):
    design, batch_size = draw(matrices(draw(st.integers(1, 4)))), draw(st.integers(1, 50))
    mu, nu = draw(momentum), draw(dampenings)
    # Safely stable: with α Tr A ≤ (1−μ)/2 both G > 0 and q < 1 hold for every batch size.
    lr = draw(st.floats(0.01, 0.5)) * (1 - mu) / ((1 - nu) * design.trace().item())
    return LinearRegression(design, draw(st.floats(0.1, 10)), batch_size, lr, mu, nu)


models = st.one_of(quadratics(), regressions())


def gradient_gain(model: SolvableSGD) -> np.ndarray:
    """The matrix that multiplies a gradient in the update of (θ, v)."""
    one = np.eye(len(model.hessian))
    return -(1 - model.dampening) * np.concatenate([model.lr * one, one])


def naive_transition(model: SolvableSGD) -> np.ndarray:
    one, zero = np.eye(len(model.hessian)), np.zeros(model.hessian.shape)
    inertia = np.block([[one, model.lr * model.momentum * one], [zero, model.momentum * one]])
    return inertia + gradient_gain(model) @ np.concatenate([model.hessian.numpy(), zero], axis=1)


def assert_close(actual, expected, rtol: float) -> None:
    """Equal up to `rtol` of the largest entry."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * np.abs(expected).max())
