"""Sweeps against exact regression."""

import pytest
import torch
from support.regression_oracle import exact_averages, half_square
from torch import nn

from equilibrate import estimates
from equilibrate.landscape import (
    NotEquilibratedError,
    Sweep,
    SweepPoint,
    SweepRun,
    fit,
    sweep,
)
from equilibrate_paper.ensemble import Epoch

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


def new_run(**options):
    settings = {"lrs": LRS, "seeds": range(8), "batch_size": BATCH}
    return SweepRun(build_model, half_square, (INPUTS, TARGETS), **{**settings, **options})


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


def test_only_rates_that_did_not_equilibrate_are_named():
    """The residual of one that did may still be above the threshold by chance."""
    held, not_held = (
        SweepPoint(lr, (1.0, 1.1), (2.0, 2.0), 0.09, 9, 9, equilibrated)
        for lr, equilibrated in ((0.1, True), (0.2, False))
    )
    found = Sweep((held, not_held), 0.0, 0.0, "independent", 50, threshold=0.02)
    with pytest.raises(
        ValueError, match=r"Where it did not, it was off by \+9 % at η = 0\.2, with"
    ):
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


def test_waiting_requires_fdr1_in_two_windows(monkeypatch):
    """The sides differ for six epochs; after ten epochs the last two quarters are later."""
    run = new_run(threshold=0.1, max_epochs=50, min_measured_epochs=1)

    def run_epoch():
        left = torch.full((4, 8), 2.0 if run.epoch < 6 else 1.0)
        return Epoch(0, 0, (0.2,), left, torch.ones(4, 8), left, left)

    monkeypatch.setattr(run._ensemble, "run_epoch", run_epoch)
    while not run.points:
        run.run_epoch()
    assert run.points[0].equilibrated
    assert run.points[0].epochs_waited == 10


@pytest.mark.parametrize(
    ("lefts", "equilibrated"),
    [
        ([9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0], True),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0], False),
        ([1.0, 1.0, 1.0, 0.5, 0.5, 1.5, 1.5], False),  # on average FDR1 holds
        ([1.0, 1.0], False),  # one measured epoch has no two halves
    ],
)
def test_fixed_number_of_epochs_tests_both_halves_of_the_measurement(
    monkeypatch, lefts, equilibrated
):
    run = new_run(epochs=len(lefts), threshold=0.1)

    def run_epoch():
        left = torch.full((4, 8), lefts[run.epoch])
        return Epoch(0, 0, (0.2,), left, torch.ones(4, 8), left, left)

    monkeypatch.setattr(run._ensemble, "run_epoch", run_epoch)
    while not run.finished:
        run.run_epoch()
    assert [point.equilibrated for point in run.result().points] == [equilibrated] * 2


def test_fixed_number_of_epochs_far_from_equilibrium_gives_no_fit():
    found = small_sweep(lrs=(1e-6, 2e-6), epochs=4)
    assert not any(point.equilibrated for point in found.points)
    with pytest.raises(
        NotEquilibratedError, match=r"held at 0 of 2 .* off by .* % at η = 1e-06, .* use more epoch"
    ):
        fit(found)


@pytest.mark.parametrize("options", [{"epochs": 5}, {"threshold": 0.5, "min_measured_epochs": 3}])
@pytest.mark.parametrize("interrupted_after", [1, 4, 7])
def test_interrupted_sweep_ends_with_the_same_points(tmp_path, options, interrupted_after):
    options = {"momentum": 0.5, "sampling": "shuffled", **options}
    run = new_run(**options)
    for _ in range(interrupted_after):
        run.run_epoch()
    torch.save(run.state_dict(), tmp_path / "state.pt")
    resumed = new_run(**options)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    while not resumed.finished:
        resumed.run_epoch()
    assert resumed.result() == small_sweep(**options)


def test_state_of_another_sweep_is_rejected():
    state = new_run(epochs=2).state_dict()
    with pytest.raises(ValueError, match=r"over lrs=\[0\.2, 0\.1\], but this one has lrs=\[3"):
        new_run(epochs=2, lrs=[3.0, 0.1]).load_state_dict(state)
    with pytest.raises(ValueError, match="momentum=0"):
        new_run(epochs=2, momentum=0.5).load_state_dict(state)


def test_finished_sweep_cannot_continue():
    run = new_run(epochs=2)
    while not run.finished:
        run.run_epoch()
    with pytest.raises(ValueError, match="the sweep is finished"):
        run.run_epoch()


def test_divergence_ends_the_sweep():
    with pytest.raises(ValueError, match=r"SGD diverged at η = 9 in epoch \d+ for the seeds 0, 2"):
        small_sweep(lrs=[9.0, 0.1], max_epochs=200)


def test_sum_over_examples_is_rejected():
    """G and the curvature would be too large by a factor of (N/|B|)²."""
    for loss in (nn.MSELoss(reduction="sum"), lambda out, y: (out - y).square().sum() / 2):
        with pytest.raises(ValueError, match="must be a mean over independent examples"):
            sweep(build_model, loss, (INPUTS, TARGETS), lrs=LRS, batch_size=BATCH)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (nn.Linear(2, 1), "build_model must be a function from a seed to a model, .* got Linear"),
        (3, "build_model must be a function from a seed to a model, .* got int"),
        (lambda seed: seed, r"build_model\(0\) must return a torch\.nn\.Module, got int"),
    ],
)
def test_something_else_than_a_builder_is_rejected(build, message):
    with pytest.raises(TypeError, match=message):
        sweep(build, half_square, (INPUTS, TARGETS), lrs=LRS)


def test_single_numbers_are_rejected():
    with pytest.raises(TypeError, match=r"lrs must be a list of numbers, .* got float"):
        small_sweep(lrs=0.1)
    with pytest.raises(TypeError, match=r"seeds must be a list of numbers, .* got int"):
        small_sweep(seeds=4)
