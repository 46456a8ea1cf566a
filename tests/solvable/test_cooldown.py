"""What a cooldown gains on a quadratic, exactly, and how well an exponential mean tells it."""

import numpy as np
import pytest
import torch

from equilibrate.forecast.match import cooldown_share, exponential_match, lagged_share
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
    steps = 1000
    model = mode(x / steps, momentum)
    gain = cooldown_gain(model, linear_cooldown(model.lr, steps))
    expected = cooldown_share(np.array([x])).item()
    # The learning rate falls by 1/n of itself in a step, and momentum looks back 1/(1−μ) of them.
    assert gain / model.excess_loss == pytest.approx(expected, rel=5 / ((1 - momentum) * steps))


def test_the_mean_with_weights_of_a_cooldown_tells_its_share_exactly():
    """Σ_k exp(−xk/n)/(2√(nk)) is the share of the noise that the cooldown leaves."""
    n, x = 400_000, np.array([0.3, 3.0, 30.0])
    k = np.arange(n) + 0.5
    left = (np.exp(-np.outer(x, k / n)) / (2 * np.sqrt(n * k))).sum(1)
    assert 1 - left == pytest.approx(cooldown_share(x), abs=1e-3)


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


@pytest.mark.parametrize(("momentum", "worst"), [(0.0, 0.02), (0.9, 0.12)])
@pytest.mark.parametrize(("steps", "every"), [(150, 16), (400, 16), (400, 1)])
def test_the_match_holds_for_every_mode(steps, every, momentum, worst):
    """Within its error for small learning rates; modes that oscillate add up to `worst`."""
    match = exponential_match(steps, every)
    for rate in np.logspace(-4, 0, 5):
        model = mode(float(rate), momentum)
        gain = cooldown_gain(model, linear_cooldown(model.lr, steps))
        told = match.factor * lagged_excess(model, match.half_life, every)
        assert told == pytest.approx(gain, rel=match.error + worst), rate


def test_the_match_is_exact_for_slow_modes():
    match, rate = exponential_match(400, every=16), 1e-9
    (share,) = lagged_share(np.array([rate]), match.half_life, 16)
    assert match.factor * share == pytest.approx(400 / 3 * rate, rel=1e-5)


@pytest.mark.parametrize("every", [0, 26])
def test_too_few_updates_for_a_match(every):
    with pytest.raises(
        ValueError, match=f"a quarter of the 100 steps of the cooldown, got {every}"
    ):
        exponential_match(100, every)
