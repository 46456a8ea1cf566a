"""Numbers read off records in which they are known, and off exact models."""

import numpy as np
import pytest
import torch
from support.synthetic import write

from equilibrate.paper.analysis import measures, results
from equilibrate.paper.data import datasets as data
from equilibrate.paper.protocol.profiles import PROFILES
from equilibrate.solvable import Quadratic
from equilibrate.solvable.shuffling import simulate_reshuffled

PAPER = PROFILES["paper"].runs


def load(run, folder, columns, **options):
    write(run, folder, columns, **options)
    return results.load(folder / "records")[run.name]


def arrived_naively(values, images):
    """Word for word what `measures.arrival` says of one seed with a row for each epoch."""
    last = values[-(len(values) // 20) :]
    final = sum(last) / len(last)
    width = 2 * (final * (1 - final) / images) ** 0.5
    arrived = None
    for epoch in range(1, len(values) + 1):
        window = values[max(0, epoch - 5) : epoch]
        if abs(sum(window) / len(window) - final) > width:
            arrived = None
        elif arrived is None:
            arrived = epoch
    return arrived


@pytest.mark.parametrize("seed", range(6))
def test_arrival_is_that_of_its_definition(tmp_path, seed):
    rng = np.random.default_rng(seed)
    time = np.arange(1, 401)
    curve = 0.7 - 0.3 * np.exp(-time / rng.uniform(2, 100)) + rng.normal(size=400) * 0.01
    curve[rng.integers(400, size=5)] -= 0.2
    run = PAPER["cnn-grid"]
    result = load(run, tmp_path, {"test_accuracy": lambda t, *_: curve[round(t) - 1]}, rows=400)
    expected = arrived_naively(curve.tolist(), 10_000)
    for arm in run.arms:
        assert measures.arrival(result, arm) == pytest.approx([expected or np.nan], nan_ok=True)


def test_an_accuracy_that_is_leaving_never_arrives(tmp_path):
    run = PAPER["cnn-grid"]
    result = load(run, tmp_path, {"test_accuracy": lambda t, *_: t / 400}, rows=400)
    assert np.isnan(measures.arrival(result, "X=0.1, Y=0.3")).all()


def test_sides_that_part_again_have_not_met(tmp_path):
    """In the last row of one seed they are apart; the other has met after a third of the tread."""

    def left(time, lr, arm, seed):
        return 1.5 if time <= 100 / 3 or (time == 100 and seed == 1) else 1.0

    run = PAPER["mlp-initial"]
    result = load(run, tmp_path, {"left": left, "right": lambda *_: 1.0})
    (tread,) = result.treads()
    times = measures.meeting_times(tread)
    assert times == pytest.approx([500 / 12, np.nan, 500 / 12, 500 / 12], nan_ok=True)
    assert measures.relaxation_power([tread]) is None


def test_rates_at_which_a_seed_has_not_met_are_left_out_of_the_fit(tmp_path):
    def left(time, lr, arm, seed):
        return 3.0 if lr == 0.003 and seed == 102 else 1 + 0.05 / (lr * time)

    run = PAPER["mlp-sequence"]
    result = load(run, tmp_path, {"left": left, "right": lambda *_: 1.0}, rows=1000)
    fit = measures.relaxation_power(result.treads())
    assert fit is not None
    assert fit[0] == pytest.approx([-1.0] * 4, abs=0.02)


def test_digits_have_as_many_test_images_as_errors_are_reckoned_with():
    assert len(data.load("digits").test_images) == 297
    assert measures.sampling_error(0.9, "digits") == pytest.approx((0.09 / 297) ** 0.5)


def product_of_one_mode(momentum, rate, batches):
    """⟨v·ξ⟩ with unit noise: how far one kick moves the mode, ηh = `rate`, on average in M steps.

    ⟨v_t·ξ_t⟩ is a sum of v's responses to the kicks before t in the epoch, each with the
    covariance −1/(M−1), and v's responses add up to that of the position.
    """
    position, velocity, total = 0.0, 0.0, 0.0
    for step in range(batches):
        total += position
        velocity = momentum * velocity - rate * position + (step == 0)
        position += velocity
    return total / batches / (batches - 1)


@pytest.mark.parametrize(
    ("momentum", "batches", "rate"), [(0.9, 60, 1e-6), (0.5, 20, 1e-6), (0.9, 60, 0.005)]
)
def test_velocity_and_noise_in_reshuffled_epochs(momentum, batches, rate):
    """Six modes of curvature 1; 1000 replicas give 1.3 % (3 % in the third), five times that here.

    In the third case x = Mηh/(1−μ) is 3, so that the modes are faster than an epoch.
    """
    eye = torch.eye(6, dtype=torch.float64)
    model = Quadratic(eye, eye, lr=rate, momentum=momentum)
    generator = torch.Generator().manual_seed(0)
    steps = simulate_reshuffled(model, model.stationary(1000, generator), batches, 8, generator)
    noise = [
        float((step.velocity * (step.gradient - step.position)).sum(1).mean()) for step in steps
    ]
    predicted = product_of_one_mode(momentum, rate, batches)
    slow = measures.reshuffled_product(momentum, batches)
    if rate < 1e-3:
        assert np.mean(noise[batches:]) == pytest.approx(6 * slow, rel=0.07)
        assert predicted == pytest.approx(slow, rel=1e-3)
    else:
        assert np.mean(noise[batches:]) == pytest.approx(6 * predicted, rel=0.15)
        assert predicted < slow / 2


def test_what_reshuffling_takes_from_the_landscape(tmp_path):
    """R̄ = (1+μ)/2 η⟨v²⟩ and ⟨v²⟩ = Tr C/(1−μ²), here with Tr C = 3 and 600 batches an epoch."""
    right = {"right": lambda time, lr, *_: lr * 3 / (2 * (1 - 0.9)), "left": lambda *_: 1.0}
    result = load(PAPER["cnn-sequence"], tmp_path, right)
    expected = -0.9 * 3 * measures.reshuffled_product(0.9, 600)
    for tread in result.treads():
        assert measures.reshuffling_offset(tread) == pytest.approx(expected)
    still = load(PAPER["mlp-sequence"], tmp_path, right)
    assert measures.reshuffling_offset(still.treads()[0]) == 0
