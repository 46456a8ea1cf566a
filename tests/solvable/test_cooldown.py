"""What a cooldown gains on a quadratic, exactly, and how well an exponential mean tells it."""

import math

import numpy as np
import pytest
import torch

from equilibrate.solvable import Quadratic, cooldown_gain, lagged_excess, linear_cooldown

SETTINGS = [{}, {"momentum": 0.9}, {"momentum": 0.8, "dampening": 0.3}]


def mode(rate, momentum=0.0, dampening=0.0):
    """One mode whose parameters relax in 1/rate steps, if that is many."""
    lr = (1 - momentum) / (1 - dampening)
    one = torch.ones(1, dtype=torch.float64)
    return Quadratic(rate * one, one, lr, momentum, dampening)


@pytest.mark.parametrize("settings", SETTINGS)
def test_cooldown_gain_is_that_of_a_scalar_recursion(settings):
    model = mode(0.3, **settings)
    h, mu, kept = 0.3, model.momentum, 1 - model.dampening
    xx, xv, vv = (c.item() for c in model._covariances)
    lrs = linear_cooldown(model.lr, 25)
    for lr in lrs:  # v′ = μv − (1−ν)(hθ + ξ), θ′ = θ + ηv′
        vv_after = mu**2 * vv - 2 * mu * kept * h * xv + kept**2 * (h**2 * xx + 1)
        xv_after = mu * xv - kept * h * xx + lr * vv_after
        xx = xx + 2 * lr * (mu * xv - kept * h * xx) + lr**2 * vv_after
        xv, vv = xv_after, vv_after
    gain = cooldown_gain(model, lrs)
    assert gain == pytest.approx(model.excess_loss - h * xx / 2, rel=1e-12)


def test_a_constant_learning_rate_gains_nothing_in_the_stationary_state():
    model = Quadratic(torch.tensor([[1.0, 0.2], [0.2, 0.3]]), torch.ones(2), 0.4, momentum=0.5)
    assert cooldown_gain(model, [0.4] * 50) == pytest.approx(0, abs=1e-12)
    assert cooldown_gain(model, [0.0] * 2000) == pytest.approx(0, abs=1e-12)  # nothing moves


@pytest.mark.parametrize("x", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_share_is_the_limit_of_small_learning_rates(x, momentum):
    """A cooldown over n steps leaves ∫₀¹ exp(−xu²) du of the noise, x = ηhn/(1−μ)."""
    steps = 1000
    model = mode(x / steps, momentum)
    gain = cooldown_gain(model, linear_cooldown(model.lr, steps))
    expected = 1 - math.sqrt(math.pi / x) / 2 * math.erf(math.sqrt(x))
    # The learning rate falls by 1/n of itself in a step, and momentum looks back 1/(1−μ) of them.
    assert gain / model.excess_loss == pytest.approx(expected, rel=5 / ((1 - momentum) * steps))


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("settings", SETTINGS)
def test_lagged_excess_is_the_mean_over_random_positions(settings, every):
    """The sum over all lags, for 4,000 sequences of positions: 2 % is eight standard errors."""
    lr = 0.8 * (1 - settings.get("momentum", 0.0))
    model = Quadratic(torch.tensor([[1.0, 0.2], [0.2, 0.1]]), torch.ones(2), lr, **settings)
    blocks, power, kept = 300 // every, model.state_covariance, []
    for _ in range((blocks + 1) * every):  # Tr H[T^age S]/2 of each age
        kept.append((model.hessian * power[:2, :2].T).sum().item() / 2)
        power = model.transition @ power
    random = np.random.default_rng(0)
    times = every * np.arange(blocks) + random.integers(every, size=(4000, blocks))
    decays = 2 ** (-np.diff(times) / 12.0)
    later = np.cumprod(decays[:, ::-1], axis=1)[:, ::-1] / decays  # of the gaps after each
    weights = (1 - decays[:, :-1]) * later[:, :-1] / decays[:, -1:]
    ages = times[:, -1:] - times[:, 1:-1]
    lagged = (weights * np.array(kept)[ages]).sum(1) / weights.sum(1)
    expected = model.excess_loss - lagged.mean()
    assert lagged_excess(model, 12.0, every) == pytest.approx(
        expected, rel=1e-3 if every == 1 else 0.02
    )


def test_a_mean_that_includes_the_present_has_the_closed_form_of_one_mode():
    model, half_life = mode(0.05), 30.0
    a, rate = 1 - 2 ** (-1 / half_life), 0.05
    expected = rate * (1 - a) / (rate + a * (1 - rate))
    found = (1 - a) * lagged_excess(model, half_life) / model.excess_loss
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("momentum", "worst"), [(0.0, 0.1), (0.9, 0.2)])
@pytest.mark.parametrize("steps", [150, 400])
def test_a_mean_that_is_a_third_as_old_as_the_cooldown_tells_what_it_gains(steps, momentum, worst):
    """For modes of any curvature. Those that oscillate, because of momentum, are told worse."""
    half_life = steps / 3 * math.log(2)
    for rate in np.logspace(-4, 0, 5):
        model = mode(float(rate), momentum)
        gain = cooldown_gain(model, linear_cooldown(model.lr, steps))
        told = lagged_excess(model, half_life)
        assert told == pytest.approx(gain, rel=worst), rate
