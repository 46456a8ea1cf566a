"""Sweeps against exact regression."""

from types import SimpleNamespace

import pytest
import torch
from support.regression_oracle import exact_averages, half_square
from torch import nn

from equilibrate import estimates
from equilibrate.ensemble import Epoch
from equilibrate.landscape import fit, sweep, sweeps

generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(8, 2, generator=generator)
TARGETS = torch.randn(8, 1, generator=generator)
LRS, BATCH = (0.1, 0.2), 2


def build_model(seed: int) -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.uniform_(model.weight, generator=torch.Generator().manual_seed(seed))
    return model


def small_sweep(**options):
    settings = {"lrs": LRS, "seeds": range(8), "batch_size": BATCH}
    return sweep(build_model, half_square, (INPUTS, TARGETS), **{**settings, **options})


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sweep_agrees_with_the_exact_averages(momentum):
    """Each point within t = 6 for eight seeds: false alarms for 3 of 10^3 seeds."""
    dampening = 0.2 if momentum else 0.0
    found = small_sweep(momentum=momentum, dampening=dampening, min_measured_epochs=200)
    assert [point.lr for point in found.points] == sorted(LRS)
    assert found.steps_per_epoch == 4
    for point in found.points:
        exact, _, noise_trace = exact_averages(
            INPUTS.double(), TARGETS.double(), point.lr, momentum, dampening, BATCH
        )
        noise = estimates.mean(torch.tensor([point.noise_trace]))
        assert abs(noise.value - noise_trace) < 6 * noise.stderr
        assert noise.stderr < 0.03 * noise_trace
        assert point.equilibrated
        assert point.epochs_measured == max(200, point.epochs_waited)
        assert abs(point.residual) < 0.1
        assert abs(point.estimate.value - exact) < 6 * point.estimate.stderr
        assert point.estimate.stderr < 0.35 * exact


def test_fixed_number_of_epochs_with_callbacks():
    epochs_seen, points_seen = [], []
    found = small_sweep(
        epochs=7,
        sampling="shuffled",
        progress=lambda lr, epoch, residual: epochs_seen.append((lr, epoch)),
        on_point=points_seen.append,
    )
    assert all((p.epochs_waited, p.epochs_measured) == (3, 4) for p in found.points)
    assert epochs_seen == [(lr, epoch) for lr in sorted(LRS, reverse=True) for epoch in range(1, 8)]
    assert tuple(reversed(points_seen)) == found.points


def test_rates_that_do_not_equilibrate_are_marked():
    def far(seed: int) -> nn.Module:
        model = build_model(seed)
        with torch.no_grad():
            model.weight += 1000
        return model

    found = sweep(
        far, half_square, (INPUTS, TARGETS), lrs=(1e-5, 1e-6), seeds=(0, 1), batch_size=2,
        max_epochs=9, min_measured_epochs=1,
    )  # fmt: skip
    assert not any(point.equilibrated for point in found.points)
    assert all(point.epochs_waited == 9 for point in found.points)
    with pytest.raises(ValueError, match="FDR1 held at 0 of 2 learning rates, but a fit needs"):
        fit(found)


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="lrs must contain at least two"):
        small_sweep(lrs=[0.1, 0.1])
    with pytest.raises(ValueError, match="seeds must be at least two"):
        small_sweep(seeds=[3])
    with pytest.raises(ValueError, match="threshold must be positive, for example"):
        small_sweep(threshold=0.0)
    with pytest.raises(ValueError, match="lrs must be positive and finite"):
        small_sweep(lrs=[0.1, -0.1])
    with pytest.raises(ValueError, match="max_epochs must be at least 8"):
        small_sweep(max_epochs=7)
    with pytest.raises(ValueError, match="epochs must be at least 2, got 1"):
        small_sweep(epochs=1)


def test_waiting_requires_fdr1_in_two_windows():
    """The sides differ for six epochs; after ten epochs the last two quarters are later."""
    ensemble = SimpleNamespace()

    def run_epoch():
        left = torch.tensor([[2.0 if run.epochs < 6 else 1.0]])
        return Epoch(0, 0, (0.1,), left, torch.ones(1, 1), left, left)

    ensemble.run_epoch = run_epoch
    run = sweeps._ConstantRateRun(ensemble, None)  # pyright: ignore[reportArgumentType]
    assert run.wait(threshold=0.1, max_epochs=50)
    assert run.epochs == 10
