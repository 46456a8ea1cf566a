"""Sweeps against exact regression."""

import pytest
import torch
from support.regression_oracle import exact_averages, half_square
from torch import nn

from equilibrate import estimates
from equilibrate.landscape import fit, sweep

generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(8, 2, generator=generator)
TARGETS = torch.randn(8, 1, generator=generator)
LRS, BATCH = (0.1, 0.2), 2


def build_model(seed: int) -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.uniform_(model.weight, generator=torch.Generator().manual_seed(seed))
    return model


def small_sweep(model=build_model, loss=half_square, **options):
    settings = {"lrs": LRS, "seeds": range(8), "batch_size": BATCH}
    return sweep(model, loss, (INPUTS, TARGETS), **{**settings, **options})


@pytest.mark.parametrize(
    ("momentum", "dampening", "model"),
    [(0.0, 0.0, build_model), (0.5, 0.2, build_model(0))],
    ids=["built", "copied, momentum"],
)
def test_sweep_agrees_with_the_exact_averages(momentum, dampening, model, monkeypatch):
    """Each point within t = 6 for eight seeds: false alarms for 3 of 10^3 seeds."""
    monkeypatch.setattr("equilibrate.landscape.sweeps._MIN_MEASURED", 80)
    found = small_sweep(model, momentum=momentum, dampening=dampening, threshold=0.05)
    assert [point.lr for point in found.points] == sorted(LRS)
    for point in found.points:
        exact, _, noise_trace = exact_averages(
            INPUTS.double(), TARGETS.double(), point.lr, momentum, dampening, BATCH
        )
        noise = estimates.mean(torch.tensor([point.noise_trace]))
        assert abs(noise.value - noise_trace) < 6 * noise.stderr
        assert noise.stderr < 0.05 * noise_trace
        assert point.equilibrated
        assert point.epochs_measured == max(80, point.epochs_waited)
        assert abs(point.residual) < 0.2
        assert abs(point.estimate.value - exact) < 6 * point.estimate.stderr
        assert point.estimate.stderr < 0.35 * exact


def test_sweep_changes_neither_the_model_nor_the_random_state():
    model, state, seen = build_model(0), torch.get_rng_state(), []
    before = model.weight.clone()
    options = {"threshold": 9.0, "max_epochs": 8, "seeds": (0, 1)}
    found = small_sweep(model, **options, progress=lambda *row: seen.append(row[:2]))
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all((p.epochs_waited, p.epochs_measured) == (8, 20) for p in found.points)
    assert seen == [(lr, epoch) for lr in sorted(LRS, reverse=True) for epoch in range(1, 29)]
    assert found == small_sweep(model, **options)


def test_waiting_requires_fdr1_in_two_windows(monkeypatch):
    """The sides differ for six epochs; after ten epochs the last two quarters are later."""
    step = 0

    def observed(s):
        nonlocal step
        step += 1
        epoch = (step - 1) // (4 * 8)  # of four steps, for eight seeds
        return torch.tensor([2.0 if epoch < 6 else 1.0, 1.0, 0.0, 1.0])

    monkeypatch.setattr("equilibrate.landscape.sweeps._observed", observed)
    largest = small_sweep(threshold=0.1, max_epochs=50).points[-1]
    assert largest.equilibrated
    assert largest.epochs_waited == 10


def test_rates_that_do_not_equilibrate_are_marked():
    def far(seed: int) -> nn.Module:
        model = build_model(seed)
        with torch.no_grad():
            model.weight += 1000
        return model

    found = small_sweep(far, lrs=(1e-5, 1e-6), seeds=(0, 1), max_epochs=9)
    assert not any(point.equilibrated for point in found.points)
    assert all(point.epochs_waited == 9 for point in found.points)
    with pytest.raises(
        ValueError, match=r"held at 0 of 2 .* off by .* % at η = 1e-06, .* use more"
    ):
        fit(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lrs": [0.1, 0.1]}, "lrs must be at least two"),
        ({"lrs": [0.1, -0.1]}, "lrs must be at least two learning rates, positive and finite"),
        ({"seeds": [3]}, "seeds must be at least two"),
        ({"threshold": 0.0}, "threshold must be positive, for example"),
        ({"max_epochs": 7}, "max_epochs must be at least 8"),
        ({"batch_size": 9}, "batch_size must be between 1 and 8, got 9"),
        ({"lrs": [9.0, 0.1], "max_epochs": 200}, r"SGD diverged at η = 9 in epoch \d+"),
        # G and the curvature would be too large by a factor of (N/|B|)².
        ({"loss": nn.MSELoss(reduction="sum")}, "must be a mean over independent examples"),
    ],
)
def test_invalid_arguments_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        small_sweep(**options)
