"""SGLD: its relation in closed form on quadratics, in simulation, and the bias of its step size."""

import pytest
import torch

from equilibrate import sgld
from equilibrate.observables import Snapshot
from equilibrate.solvable import Quadratic

CURVATURES = torch.tensor([2.0, 0.5, 0.1]).double()
NOISE = torch.tensor([3.0, 0.2, 1.0]).double()
MINIMUM = torch.tensor([1.0, -2.0, 0.5]).double()


def stationary_variance(step_size, noise):
    """Of θ′ = θ − (ε/2)(h(θ−m) + ζ) + √ε ξ: Σ = (1−εh/2)²Σ + (ε²/4)c + ε, in each mode."""
    shrink = 1 - step_size * CURVATURES / 2
    return (step_size + step_size**2 / 4 * noise) / (1 - shrink**2)


@pytest.mark.parametrize("step_size", [1e-3, 0.1, 1.5])
@pytest.mark.parametrize("noise", [torch.zeros(3).double(), NOISE], ids=["full batch", "batches"])
def test_the_relation_and_the_bias_are_exact_on_a_quadratic(step_size, noise):
    variance = stationary_variance(step_size, noise)
    gradient_square = (CURVATURES**2 * variance + noise).sum()
    # With its minimum as centre, and with the origin: ⟨g⟩ = 0.
    left = (CURVATURES * variance).sum()
    assert left.item() == pytest.approx((3 + step_size / 4 * gradient_square).item(), rel=1e-12)
    energy = 0.5 * left
    bias = sgld.step_size_bias(gradient_square, step_size)
    assert energy.item() == pytest.approx(1.5 + bias.item(), rel=1e-12)


@pytest.mark.parametrize("step_size", [0.01, 0.8])
def test_it_is_sgd_with_a_noisier_gradient(step_size):
    """The solvable model's covariance, from its Lyapunov equation, is that of the recursion."""
    model = Quadratic(CURVATURES, NOISE + 4 / step_size, lr=step_size / 2)
    variance = stationary_variance(step_size, NOISE)
    gradient_square = (CURVATURES**2 * variance + NOISE).sum().item()
    assert model.fdr1_right == pytest.approx(3 + step_size / 4 * gradient_square, rel=1e-10)
    assert model.excess_loss == pytest.approx(
        1.5 + sgld.step_size_bias(gradient_square, step_size), rel=1e-10
    )


@pytest.mark.parametrize("centre", [None, MINIMUM], ids=["origin", "minimum"])
def test_simulated_runs_cover_the_relation_and_the_exact_sides(centre):
    """2,000 replicas; a 95 % interval is missed by chance in 1 run of 20, by 4 σ in 1 of 16,000."""
    step_size, generator = 0.3, torch.Generator().manual_seed(0)

    def normal():
        return torch.randn(2000, 3, generator=generator, dtype=torch.float64)

    variance = stationary_variance(step_size, NOISE)
    theta = MINIMUM + variance.sqrt() * normal()
    snapshots = []
    for _ in range(100):
        g = CURVATURES * (theta - MINIMUM) + NOISE.sqrt() * normal()
        snapshots.append(Snapshot(theta, g, lr=step_size / 2))
        theta = theta - step_size / 2 * g + step_size**0.5 * normal()
    found = sgld.relation(step_size, centre).measure(snapshots)
    exact = (CURVATURES * variance).sum().item()
    for side in (found.left, found.right):
        assert abs(side.value - exact) < 4 * side.stderr
    assert abs(found.difference.value) < 4 * found.difference.stderr
    assert found.right.stderr < 0.01 * exact  # the comparison is not trivial
    without = 3.0  # what exp(−U) has
    assert abs(found.right.value - without) > 20 * found.right.stderr


def test_a_step_size_must_be_positive():
    with pytest.raises(ValueError, match="step_size must be positive, such as 1e-4, got 0"):
        sgld.relation(0)
    with pytest.raises(ValueError, match=r"step_size must be positive, such as 1e-4, got -0\.1"):
        sgld.step_size_bias(1.0, -0.1)
