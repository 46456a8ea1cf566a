"""Fits against synthetic sweeps with a known slope and nonlinearity."""

from dataclasses import replace

import pytest
import torch

from equilibrate.landscape import Sweep, SweepPoint, fit

CURVATURE, NOISE = 3.0, 2.0


def synthetic(bend=0.0, spread=0.02, seed=0, momentum=0.0, dampening=0.0) -> Sweep:
    """A sweep with G = (η/2)·h·Tr C̃·(1 + bend·η) and a relative spread among six seeds."""
    draw = torch.Generator().manual_seed(seed)
    points = []
    for lr in (0.01, 0.02, 0.05, 0.1):
        scatter = 1 + spread * torch.randn(6, generator=draw, dtype=torch.float64)
        g = lr / 2 * CURVATURE * NOISE * (1 + bend * lr) * scatter
        points.append(SweepPoint(lr, tuple(g.tolist()), (NOISE,) * 6, 0.0, 10, 10, True))
    return Sweep(tuple(points), momentum, dampening, threshold=0.02)


def test_slope_and_curvature_cover_the_truth():
    """1,000 linear sweeps. Some lines end early because of a false alarm."""
    fits = [fit(synthetic(seed=k)) for k in range(1000)]
    for share in (
        sum(f.hessian_noise.covers(CURVATURE * NOISE) for f in fits) / len(fits),
        sum(f.curvature.covers(CURVATURE) for f in fits) / len(fits),
    ):
        assert 0.93 < share < 0.97
    false = sum(not d.covers(0) for f in fits for d in f.departures.values()) / 3 / len(fits)
    assert 0.03 < false < 0.08


def test_nonlinearity_is_detected():
    found = fit(synthetic(bend=5.0))
    assert found.linear_up_to in (0.01, 0.02)
    assert not found.departures[0.1].covers(0)
    assert found.departures[0.1].value == pytest.approx(0.5 / 1.05, abs=0.1)
    assert "the loss is not harmonic" in found.summary()
    linear = fit(synthetic())
    assert linear.linear_up_to == 0.1
    assert "consistent with a harmonic loss" in linear.summary()


def test_momentum_scales_the_slope():
    found = fit(synthetic(spread=0.0, momentum=0.9, dampening=0.5))
    assert found.hessian_noise.value == pytest.approx(
        CURVATURE * NOISE * (1 - 0.81) / 0.25, rel=1e-9
    )


def test_points_out_of_equilibrium_are_excluded():
    whole = synthetic(spread=0.0)
    first = SweepPoint(0.001, (9.0,) * 6, (NOISE,) * 6, 0.5, 10, 10, False)
    found = fit(replace(whole, points=(first, *whole.points)))
    assert found.excluded == (0.001,)
    assert found.hessian_noise.value == pytest.approx(CURVATURE * NOISE, rel=1e-9)
    assert found.summary().startswith("Excluded, because FDR1 did not hold in time: η = 0.001")
    with pytest.raises(ValueError, match=r"held at 1 of 2 .* off by \+50 % at η = 0\.001, with"):
        fit(replace(whole, points=(first, whole.points[0])))


@pytest.mark.parametrize("bend", [0.0, 5.0])
def test_no_conclusion_is_drawn_far_from_equilibrium(bend):
    whole = synthetic(bend=bend)
    assert fit(whole).unsettled == ()
    off = replace(whole.points[-1], residual=-0.5)
    found = fit(replace(whole, points=(*whole.points[:-1], off)))
    assert found.unsettled == ((0.1, -0.5),)
    assert found.summary().startswith("Caution: FDR1 was off by -50 % at η = 0.1 during the meas")
    assert "No conclusion about the shape of the loss" in found.summary()
    assert "harmonic" not in found.summary()


def test_points_without_noise_are_rejected():
    """Full batches, for example."""
    whole = synthetic()
    first = SweepPoint(0.001, (0.0,) * 6, (0.0,) * 6, 0.0, 10, 10, True)
    with pytest.raises(ValueError, match=r"no noise at η = 0\.001, .* smaller than the data"):
        fit(replace(whole, points=(first, *whole.points)))
