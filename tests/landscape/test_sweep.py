"""G(η) against exact regression, its fit against made-up sweeps."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.regression_oracle import exact_averages, half_square
from torch import nn

from equilibrate import estimates
from equilibrate.ensemble import Epoch
from equilibrate.estimates import Estimate
from equilibrate.landscape import Departure, RateReading, Sweep, fit, sweep, sweeps
from equilibrate.landscape import plot as landscape_figure
from equilibrate.solvable import epoch_end_factor

generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(8, 2, generator=generator)
TARGETS = torch.randn(8, 1, generator=generator)
LRS, BATCH = (0.1, 0.2), 2


def build(seed: int) -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.uniform_(model.weight, generator=torch.Generator().manual_seed(seed))
    return model


def small_sweep(**options):
    settings = {"lrs": LRS, "seeds": range(8), "batch_size": BATCH, "loss": half_square}
    return sweep(build, (INPUTS, TARGETS), **{**settings, **options})


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_sweep_is_the_exact_curve(momentum):
    """Each rate within t = 6 of eight seeds: false alarms in 3 of 10^3 draws of the seeds."""
    dampening = 0.2 if momentum else 0.0
    found = small_sweep(momentum=momentum, dampening=dampening, measure=200)
    assert [rate.lr for rate in found.rates] == sorted(LRS)
    assert found.batches == 4
    for rate in found.rates:
        exact, _, noise_trace = exact_averages(
            INPUTS.double(), TARGETS.double(), rate.lr, momentum, dampening, BATCH
        )
        noise = estimates.mean(torch.tensor([rate.noise_trace]))
        assert abs(noise.value - noise_trace) < 6 * noise.stderr
        assert noise.stderr < 0.03 * noise_trace
        assert rate.equilibrated
        assert rate.measured == max(200, rate.waited)
        assert abs(rate.residual) < 0.1
        assert abs(rate.estimate.value - exact) < 6 * rate.estimate.stderr
        assert rate.estimate.stderr < 0.35 * exact


def test_fixed_epochs_are_those_of_the_paper():
    told = []
    found = small_sweep(
        epochs=7, sampling="shuffled", progress=lambda lr, epoch, residual: told.append((lr, epoch))
    )
    assert all((rate.waited, rate.measured) == (3, 4) for rate in found.rates)
    assert told == [(lr, epoch) for lr in sorted(LRS, reverse=True) for epoch in range(1, 8)]


def test_a_rate_that_does_not_equilibrate_is_said_so():
    def far(seed: int) -> nn.Module:
        model = build(seed)
        with torch.no_grad():
            model.weight += 1000
        return model

    found = sweep(
        far, (INPUTS, TARGETS), lrs=(1e-5, 1e-6), seeds=(0, 1), batch_size=2,
        loss=half_square, max_epochs=9, measure=1,
    )  # fmt: skip
    assert not any(rate.equilibrated for rate in found.rates)
    assert all(rate.waited == 9 for rate in found.rates)
    with pytest.raises(ValueError, match="FDR1 held at 0 of 2 learning rates"):
        fit(found)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="lrs must hold at least two"):
        small_sweep(lrs=[0.1, 0.1])
    with pytest.raises(ValueError, match="seeds must be at least two"):
        small_sweep(seeds=[3])
    with pytest.raises(ValueError, match="tolerance must be positive"):
        small_sweep(tolerance=0.0)
    with pytest.raises(ValueError, match="max_epochs must be at least 8"):
        small_sweep(max_epochs=7)
    with pytest.raises(ValueError, match="epochs must be at least 2, got 1"):
        small_sweep(epochs=1)


def test_a_norm_that_turns_around_fools_neither_window():
    """The sides differ for six epochs and then meet: two quarters are past it after the tenth."""
    ensemble = SimpleNamespace()

    def run_epoch():
        left = torch.tensor([[2.0 if len(run.left) < 6 else 1.0]])
        return Epoch(0, 0, (0.1,), left, torch.ones(1, 1), left, left)

    ensemble.run_epoch = run_epoch
    run = sweeps._AtOneRate(ensemble, None)  # pyright: ignore[reportArgumentType]
    assert run.wait(tolerance=0.1, longest=50)
    assert len(run.left) == 10


# -- fits --------------------------------------------------------------------------------------

CURVATURE, NOISE = 3.0, 2.0


def made_up(
    bend: float = 0.0, spread: float = 0.02, seed: int = 0, seeds: int = 6, **settings
) -> Sweep:
    """G = (η/2)·h·Tr C̃·(1 + bend·η) with scatter among seeds."""
    draw = torch.Generator().manual_seed(seed)
    rates = []
    for lr in (0.01, 0.02, 0.05, 0.1):
        scatter = 1 + spread * torch.randn(seeds, generator=draw, dtype=torch.float64)
        g = lr / 2 * CURVATURE * NOISE * (1 + bend * lr) * scatter
        rates.append(RateReading(lr, tuple(g.tolist()), (NOISE,) * seeds, 0.0, 10, 10, True))
    values = {
        "momentum": 0.0, "dampening": 0.0, "sampling": "independent", "batches": 50,
        "tolerance": 0.02, **settings,
    }  # fmt: skip
    return Sweep(tuple(rates), **values)


def test_slope_and_curvature_cover_the_truth():
    """1,000 straight sweeps. Stopping at a false bend is part of the rule, and of the share."""
    fits = [fit(made_up(seed=k)) for k in range(1000)]
    for share in (
        sum(f.hessian_noise.covers(CURVATURE * NOISE) for f in fits) / len(fits),
        sum(f.curvature.covers(CURVATURE) for f in fits) / len(fits),
    ):
        assert 0.93 < share < 0.97
    false = sum(d.bends for f in fits for d in f.departures) / 3 / len(fits)
    assert 0.03 < false < 0.08


def test_a_bend_is_found_where_it_is():
    found = fit(made_up(bend=5.0))
    assert found.linear_up_to in (0.01, 0.02)
    last = found.departures[-1]
    assert last.bends
    assert last.index.value == pytest.approx(0.5 / 1.05, abs=0.1)
    assert "the loss is not harmonic" in found.summary()
    straight = fit(made_up())
    assert straight.linear_up_to == 0.1
    assert "nothing speaks against" in straight.summary()


def test_the_shuffling_bias_of_one_mode_is_undone_exactly():
    plain = made_up(spread=0.0)
    factors = [epoch_end_factor(rate.lr * CURVATURE, plain.batches).item() for rate in plain.rates]
    biased = tuple(
        RateReading(r.lr, tuple(f * g for g in r.second_left), r.noise_trace, 0.0, 1, 1, True)
        for r, f in zip(plain.rates, factors, strict=True)
    )
    found = fit(Sweep(biased, 0.0, 0.0, "shuffled", plain.batches, 0.02))
    assert found.corrected
    assert found.hessian_noise.value == pytest.approx(CURVATURE * NOISE, rel=1e-6)
    assert [f for _, f in found.shuffling] == pytest.approx(factors, rel=1e-6)
    honest = fit(plain)
    assert not honest.corrected
    assert [f for _, f in honest.shuffling] == pytest.approx(factors, rel=1e-6)
    assert f"up to {100 * (1 - factors[0]):.0f} % too low at η = 0.01" in honest.summary()


def test_a_spectrum_lies_between_the_slopes_without_and_with_the_correction():
    curvatures, batches = torch.tensor([0.1, 1.0, 8.0]).double(), 50
    truth = curvatures.sum().item()  # the noise has unit variance along each
    rates = tuple(
        RateReading(
            lr,
            ((lr / 2 * curvatures * epoch_end_factor(lr * curvatures, batches)).sum().item(),) * 3,
            (3.0,) * 3, 0.0, 1, 1, True,
        )
        for lr in (0.01, 0.02)
    )  # fmt: skip
    biased, corrected = (
        fit(Sweep(rates, 0.0, 0.0, sampling, batches, 0.02)).hessian_noise.value
        for sampling in ("independent", "shuffled")
    )
    assert biased < truth < corrected


def test_with_momentum_the_slope_has_its_factor_and_no_shuffling_is_claimed():
    found = fit(made_up(spread=0.0, momentum=0.9, dampening=0.5, sampling="shuffled"))
    assert found.hessian_noise.value == pytest.approx(
        CURVATURE * NOISE * (1 - 0.81) / 0.25, rel=1e-9
    )
    assert all(math.isnan(factor) for _, factor in found.shuffling)
    assert "reshuffled" not in found.summary()


def test_rates_without_noise_are_refused():
    """Of full batches, say."""
    first = RateReading(0.001, (0.0,) * 6, (0.0,) * 6, 0.0, 10, 10, True)
    with pytest.raises(ValueError, match=r"no noise at η = 0.001, .* smaller than the data"):
        fit(Sweep((first, *made_up().rates), 0.0, 0.0, "independent", 50, 0.02))


def test_rates_out_of_equilibrium_are_left_out():
    whole = made_up(spread=0.0)
    first = RateReading(0.001, (9.0,) * 6, (NOISE,) * 6, 0.5, 10, 10, False)
    found = fit(Sweep((first, *whole.rates), 0.0, 0.0, "independent", 50, 0.02))
    assert found.left_out == (0.001,)
    assert found.hessian_noise.value == pytest.approx(CURVATURE * NOISE, rel=1e-9)
    assert "FDR1 did not hold in time: η = 0.001" in found.summary()
    figure = landscape_figure.draw(
        Sweep((first, *whole.rates), 0.0, 0.0, "independent", 50, 0.02), found
    )
    assert "FDR1 does not hold" in [t.get_text() for t in figure.axes[0].get_legend().get_texts()]


def test_rates_that_were_not_waited_for_and_are_off_are_told():
    whole = made_up()
    assert fit(whole).unsettled == ()
    off = replace(whole.rates[-1], residual=-0.5)
    found = fit(replace(whole, rates=(*whole.rates[:-1], off)))
    assert found.unsettled == ((0.1, -0.5),)
    assert "FDR1 was off by -50 % at η = 0.1" in found.summary()


@pytest.mark.parametrize("side", ["second_left", "noise_trace"])
def test_rates_that_diverged_are_refused(side):
    """In a sweep that waits for nothing."""
    whole = made_up()
    wild = replace(whole.rates[-1], **{side: (1.0, math.nan)})
    with pytest.raises(ValueError, match=r"not finite at η = 0.1, .* leave the largest rates"):
        fit(replace(whole, rates=(*whole.rates[:-1], wild)))


def test_a_departure_bends_where_zero_is_outside():
    assert Departure(0.1, Estimate(0.2, 0.05)).bends
    assert not Departure(0.1, Estimate(0.2, 0.15)).bends
