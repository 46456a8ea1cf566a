"""Numbers computed from records in which they are known, and from exact models."""

import numpy as np
import pytest
import torch
from paper_support.synthetic import write

from equilibrate.solvable import Quadratic
from equilibrate.solvable.shuffling import simulate_reshuffled
from equilibrate_paper.analysis import measures, results
from equilibrate_paper.data import datasets as data
from equilibrate_paper.protocol.profiles import PROFILES

PAPER = PROFILES["paper"].runs


def load(run, folder, columns, **options):
    write(run, folder, columns, **options)
    return results.load(folder / "records")[run.name]


def arrived_naively(values, images):
    """The definition in `measures.arrival`, for one seed with a row for each epoch."""
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
def test_arrival_equals_its_naive_definition(tmp_path, seed):
    rng = np.random.default_rng(seed)
    time = np.arange(1, 401)
    curve = 0.7 - 0.3 * np.exp(-time / rng.uniform(2, 100)) + rng.normal(size=400) * 0.01
    curve[rng.integers(400, size=5)] -= 0.2
    run = PAPER["cnn-grid"]
    result = load(run, tmp_path, {"test_accuracy": lambda t, *_: curve[round(t) - 1]}, rows=400)
    expected = arrived_naively(curve.tolist(), 10_000)
    for arm in run.arms:
        assert measures.arrival(result, arm) == pytest.approx([expected or np.nan], nan_ok=True)


def test_an_accuracy_that_keeps_rising_never_arrives(tmp_path):
    run = PAPER["cnn-grid"]
    result = load(run, tmp_path, {"test_accuracy": lambda t, *_: t / 400}, rows=400)
    assert np.isnan(measures.arrival(result, "X=0.1, Y=0.3")).all()


def test_sides_that_separate_again_have_not_relaxed(tmp_path):
    """In the last row of one seed the sides differ; the others relax after a third of the phase."""

    def left(time, lr, arm, seed):
        return 1.5 if time <= 100 / 3 or (time == 100 and seed == 1) else 1.0

    run = PAPER["mlp-initial"]
    result = load(run, tmp_path, {"left": left, "right": lambda *_: 1.0})
    (phase,) = result.phases()
    times = measures.relaxation_times(phase)
    assert times == pytest.approx([500 / 12, np.nan, 500 / 12, 500 / 12], nan_ok=True)
    assert measures.relaxation_power([phase]) is None


def test_learning_rates_without_relaxation_are_left_out_of_the_fit(tmp_path):
    def left(time, lr, arm, seed):
        return 3.0 if lr == 0.003 and seed == 102 else 1 + 0.05 / (lr * time)

    run = PAPER["mlp-sequence"]
    result = load(run, tmp_path, {"left": left, "right": lambda *_: 1.0}, rows=1000)
    fit = measures.relaxation_power(result.phases())
    assert fit is not None
    assert fit[0] == pytest.approx([-1.0] * 4, abs=0.02)


def test_sampling_error_uses_the_number_of_test_images():
    assert len(data.load("digits").test_images) == measures.TEST_IMAGES["digits"] == 297
    assert measures.sampling_error(0.9, "digits") == pytest.approx((0.09 / 297) ** 0.5)


def product_of_one_mode(momentum, rate, batches):
    """⟨v·ξ⟩ with unit noise for ηh = `rate`: the mean displacement of a mode by one noise term.

    ⟨v_t·ξ_t⟩ is the sum of the responses of v to the noises before t in the epoch. Each has the
    covariance −1/(M−1) with ξ_t, and the responses of v add up to that of the position.
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
def test_product_of_velocity_and_noise_in_reshuffled_epochs(momentum, batches, rate):
    """Six modes of curvature 1, within five standard errors.

    1000 replicas have a standard error of 1.3 %, or 3 % in the third case, in which the modes are
    faster than an epoch: x = Mηh/(1−μ) is 3.
    """
    eye = torch.eye(6, dtype=torch.float64)
    model = Quadratic(eye, eye, lr=rate, momentum=momentum)
    generator = torch.Generator().manual_seed(0)
    steps = simulate_reshuffled(model, model.stationary(1000, generator), batches, 8, generator)
    noise = [
        float((step.velocity_before * (step.gradient - step.parameters)).sum(1).mean())
        for step in steps
    ]
    predicted = product_of_one_mode(momentum, rate, batches)
    slow = measures.reshuffled_product(momentum, batches)
    if rate < 1e-3:
        assert np.mean(noise[batches:]) == pytest.approx(6 * slow, rel=0.07)
        assert predicted == pytest.approx(slow, rel=1e-3)
    else:
        assert np.mean(noise[batches:]) == pytest.approx(6 * predicted, rel=0.15)
        assert predicted < slow / 2


def test_offset_of_the_landscape_by_reshuffling(tmp_path):
    """R̄ = (1+μ)/2 η⟨v²⟩ and ⟨v²⟩ = Tr C/(1−μ²), here with Tr C = 3 and 600 batches an epoch."""
    right = {"right": lambda time, lr, *_: lr * 3 / (2 * (1 - 0.9)), "left": lambda *_: 1.0}
    result = load(PAPER["cnn-sequence"], tmp_path, right)
    expected = -0.9 * 3 * measures.reshuffled_product(0.9, 600)
    for phase in result.phases():
        assert measures.reshuffling_offset(phase) == pytest.approx(expected)
    still = load(PAPER["mlp-sequence"], tmp_path, right)
    assert measures.reshuffling_offset(still.phases()[0]) == 0
