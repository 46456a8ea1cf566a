"""Fits against synthetic sweeps with a known slope, nonlinearity and shuffling bias."""

import math
from dataclasses import replace

import pytest
import torch
from support.synthetic_sweeps import CURVATURE, NOISE, synthetic

from equilibrate.estimates import Estimate
from equilibrate.landscape import Departure, Sweep, SweepPoint, fit
from equilibrate.solvable import epoch_end_factor


def test_slope_and_curvature_cover_the_truth():
    """1,000 linear sweeps. Some lines end early because of a false alarm."""
    fits = [fit(synthetic(seed=k)) for k in range(1000)]
    for share in (
        sum(f.hessian_noise.covers(CURVATURE * NOISE) for f in fits) / len(fits),
        sum(f.curvature.covers(CURVATURE) for f in fits) / len(fits),
    ):
        assert 0.93 < share < 0.97
    false = sum(d.significant for f in fits for d in f.departures) / 3 / len(fits)
    assert 0.03 < false < 0.08


def test_nonlinearity_is_detected():
    found = fit(synthetic(bend=5.0))
    assert found.linear_up_to in (0.01, 0.02)
    last = found.departures[-1]
    assert last.significant
    assert last.index.value == pytest.approx(0.5 / 1.05, abs=0.1)
    assert "the loss is not harmonic" in found.summary()
    linear = fit(synthetic())
    assert linear.linear_up_to == 0.1
    assert "consistent with a harmonic loss" in linear.summary()


def test_shuffling_bias_of_one_mode_is_corrected_exactly():
    plain = synthetic(spread=0.0)
    batches = plain.steps_per_epoch
    factors = [epoch_end_factor(p.lr * CURVATURE, batches).item() for p in plain.points]
    biased = tuple(
        replace(p, fdr2_left=tuple(f * g for g in p.fdr2_left))
        for p, f in zip(plain.points, factors, strict=True)
    )
    found = fit(Sweep(biased, 0.0, 0.0, "shuffled", batches, 0.02))
    assert found.corrected
    assert found.hessian_noise.value == pytest.approx(CURVATURE * NOISE, rel=1e-6)
    assert [f for _, f in found.shuffling_factors] == pytest.approx(factors, rel=1e-6)
    unbiased = fit(plain)
    assert not unbiased.corrected
    assert [f for _, f in unbiased.shuffling_factors] == pytest.approx(factors, rel=1e-6)
    assert f"up to {100 * (1 - factors[0]):.0f} % too low at η = 0.01" in unbiased.summary()


def test_slope_of_a_spectrum_lies_between_uncorrected_and_corrected():
    curvatures, batches = torch.tensor([0.1, 1.0, 8.0]).double(), 50
    truth = curvatures.sum().item()  # the noise has unit variance along each mode
    points = tuple(
        SweepPoint(
            lr,
            ((lr / 2 * curvatures * epoch_end_factor(lr * curvatures, batches)).sum().item(),) * 3,
            (3.0,) * 3, 0.0, 1, 1, True,
        )
        for lr in (0.01, 0.02)
    )  # fmt: skip
    biased, corrected = (
        fit(Sweep(points, 0.0, 0.0, sampling, batches, 0.02)).hessian_noise.value
        for sampling in ("independent", "shuffled")
    )
    assert biased < truth < corrected


def test_fit_with_momentum_scales_the_slope_and_has_no_shuffling_factor():
    found = fit(synthetic(spread=0.0, momentum=0.9, dampening=0.5, sampling="shuffled"))
    assert found.hessian_noise.value == pytest.approx(
        CURVATURE * NOISE * (1 - 0.81) / 0.25, rel=1e-9
    )
    assert all(math.isnan(factor) for _, factor in found.shuffling_factors)
    assert "reshuffled" not in found.summary()


def test_points_without_noise_are_rejected():
    """Full batches, for example."""
    first = SweepPoint(0.001, (0.0,) * 6, (0.0,) * 6, 0.0, 10, 10, True)
    with pytest.raises(ValueError, match=r"no noise at η = 0\.001, .* smaller than the data"):
        fit(Sweep((first, *synthetic().points), 0.0, 0.0, "independent", 50, 0.02))


def test_points_out_of_equilibrium_are_excluded():
    whole = synthetic(spread=0.0)
    first = SweepPoint(0.001, (9.0,) * 6, (NOISE,) * 6, 0.5, 10, 10, False)
    found = fit(Sweep((first, *whole.points), 0.0, 0.0, "independent", 50, 0.02))
    assert found.excluded == (0.001,)
    assert found.hessian_noise.value == pytest.approx(CURVATURE * NOISE, rel=1e-9)
    assert found.summary().startswith("Excluded, because FDR1 did not hold in time: η = 0.001")


def test_points_above_the_threshold_are_reported():
    whole = synthetic()
    assert fit(whole).unsettled == ()
    off = replace(whole.points[-1], residual=-0.5)
    found = fit(replace(whole, points=(*whole.points[:-1], off)))
    assert found.unsettled == ((0.1, -0.5),)
    assert found.summary().startswith("Caution: FDR1 was off by -50 % at η = 0.1 during the meas")


@pytest.mark.parametrize("bend", [0.0, 5.0])
def test_no_conclusion_is_drawn_far_from_equilibrium(bend):
    whole = synthetic(bend=bend)
    points = tuple(replace(point, residual=80.0) for point in whole.points)
    caution, *_, conclusion, _ = fit(replace(whole, points=points)).summary().splitlines()
    assert caution.startswith("Caution: FDR1 was off by +8e+03 % at η = 0.01, ")
    assert conclusion.startswith("No conclusion about the shape of the loss")
    assert "harmonic" not in fit(replace(whole, points=points)).summary()


@pytest.mark.parametrize("side", ["fdr2_left", "noise_trace"])
def test_points_that_diverged_are_rejected(side):
    whole = synthetic()
    diverged = replace(whole.points[-1], **{side: (1.0, math.nan)})
    with pytest.raises(ValueError, match=r"not finite at η = 0\.1, .* remove the largest rates"):
        fit(replace(whole, points=(*whole.points[:-1], diverged)))


def test_departure_is_significant_if_zero_is_outside_the_interval():
    assert Departure(0.1, Estimate(0.2, 0.05)).significant
    assert not Departure(0.1, Estimate(0.2, 0.15)).significant
