"""Estimates compared with scipy and naive code, and how often their intervals cover the truth."""

import math

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibrate import estimates
from equilibrate.estimates import Estimate, student_quantile


@given(st.floats(0.01, 0.999), st.integers(1, 1000))
def test_student_quantile_equals_scipy(confidence, dof):
    exact = scipy.stats.t.ppf((1 + confidence) / 2, dof)
    assert student_quantile(confidence, dof) == pytest.approx(exact, rel=1e-9)


def test_student_quantile_approaches_the_normal_quantile():
    assert student_quantile(0.95, math.inf) == pytest.approx(1.959963984540054, rel=1e-12)
    assert student_quantile(0.95, 1001) == pytest.approx(student_quantile(0.95, 1000), rel=2e-3)
    assert student_quantile(0.95, 2.9) == student_quantile(0.95, 2)  # the wider interval


@given(st.integers(1, 200), st.integers(0, 100))
def test_mean_equals_naive_batch_means(steps, seed):
    series = torch.randn(steps, generator=torch.Generator().manual_seed(seed))
    found = estimates.mean(series)
    assert found.value == pytest.approx(series.double().mean().item(), rel=1e-12, abs=1e-12)
    assert found.count == steps
    length = max(1, steps // 20)
    kept = series.tolist()[steps % length :]
    means = [sum(kept[k : k + length]) / length for k in range(0, len(kept), length)]
    if len(means) == 1:
        assert math.isnan(found.stderr)
        return
    centre = sum(means) / len(means)
    variance = sum((m - centre) ** 2 for m in means) / (len(means) - 1)
    assert found.stderr == pytest.approx(math.sqrt(variance * length / steps), rel=1e-6)
    assert found.dof == len(means) - 1


def autoregressive(steps: int, runs: int, memory: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, runs, generator=generator, dtype=torch.float64)
    x, rows = noise[0] / math.sqrt(1 - memory**2), []
    for kick in noise:
        x = memory * x + kick
        rows.append(x)
    return torch.stack(rows)


def share_covered(found: list[Estimate], truth: float) -> float:
    return sum(e.covers(truth) for e in found) / len(found)


def test_batch_means_cover_the_mean_of_a_correlated_series():
    """2,000 series, correlation time 9. Exact intervals would fail this once in 20,000 seeds."""
    series = autoregressive(4000, 2000, memory=0.8, seed=0)
    assert 0.93 < share_covered([estimates.mean(x) for x in series.T], 0.0) < 0.97
    naive = (series.mean(0).abs() <= 1.96 * series.std(0) / math.sqrt(len(series))).double().mean()
    assert naive < 0.6  # with the steps taken as independent


def test_means_of_runs_cover_the_mean_for_any_correlation():
    groups = autoregressive(50, 8000, memory=0.95, seed=1).split(4, dim=1)
    assert 0.93 < share_covered([estimates.mean(x) for x in groups], 0.0) < 0.97


def test_ratio_covers_the_ratio_of_the_means():
    b = 2 + autoregressive(4000, 2000, memory=0.5, seed=2) / 4
    a = 3 * b + autoregressive(4000, 2000, memory=0.5, seed=3)
    found = [estimates.ratio(x, y) for x, y in zip(a.T, b.T, strict=True)]
    assert 0.93 < share_covered(found, 3.0) < 0.97


def test_margin_is_students_interval():
    assert Estimate(1.0, 0.1, dof=4).margin == pytest.approx(2.7764451 * 0.1)
    assert Estimate(1.0, 0.1, dof=4, confidence=0.99).margin == pytest.approx(4.6040949 * 0.1)
    assert Estimate(1.0, 0.1).interval == pytest.approx((1 - 0.1959964, 1 + 0.1959964))
    assert math.isnan(Estimate(1.0, math.nan, dof=1).margin)
    samples = torch.tensor([1.0, 2.0, 3.0])
    # t(0.995, 2) = 9.9248 and s/√n = 0.57735
    found = estimates.mean(samples, independent=True, confidence=0.99)
    assert (found.value, found.margin) == pytest.approx((2.0, 9.924843 * 0.5773503))
    assert found.method == "3 independent samples"


def test_scaled_and_shifted_change_value_and_error_alone():
    one = Estimate(1.0, 0.1, dof=4, confidence=0.99, count=50, method="by hand")
    scaled = one.scaled(-3)
    assert (scaled.value, scaled.stderr) == pytest.approx((-3.0, 0.3))
    assert scaled.margin == pytest.approx(3 * one.margin)
    assert (scaled.dof, scaled.confidence, scaled.count, scaled.method) == (4, 0.99, 50, "by hand")
    shifted = one.shifted(-1)
    assert (shifted.value, shifted.stderr, shifted.margin) == (0.0, one.stderr, one.margin)


def test_difference_and_quotient_add_errors_in_squares():
    a, b = Estimate(3.0, 0.3, dof=3, count=4), Estimate(-2.0, 0.4, dof=7, count=8)
    difference, quotient = a.minus(b), a.over(b)
    assert (difference.value, difference.stderr) == pytest.approx((5.0, 0.5))
    assert difference.margin == pytest.approx(math.hypot(a.margin, b.margin))
    assert quotient.value == pytest.approx(-1.5)
    relative = math.hypot(0.3 / 3, 0.4 / 2), math.hypot(a.margin / 3, b.margin / 2)
    assert (quotient.stderr, quotient.margin) == pytest.approx(tuple(1.5 * r for r in relative))
    assert (difference.dof, difference.count) == (quotient.dof, quotient.count) == (3, 12)


@pytest.mark.parametrize(("first", "second"), [(4, 4), (16, 8)])
def test_intervals_of_independent_quotients_are_conservative(first, second):
    """2 % and 4 % of the intervals miss: two Student quantiles are larger than one of both.

    3000 quotients have an error of 0.4 %, so that 5 % is 2.5 errors from the second.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (
        1 + 0.2 * torch.randn(3000, n, generator=generator, dtype=torch.float64)
        for n in (first, second)
    )
    found = [
        estimates.mean(x, independent=True).over(estimates.mean(y, independent=True))
        for x, y in zip(0.8 * a, b, strict=True)
    ]
    assert 0.95 < share_covered(found, 0.8) < 0.99


@pytest.mark.parametrize("correlation", [-0.8, 0.0, 0.8])
@pytest.mark.parametrize("samples", [4, 16])
def test_intervals_of_paired_ratios_cover_for_any_correlation(samples, correlation):
    """Taken as independent, 0.03 % to 13 % of the intervals would miss.

    10,000 ratios have an error of 0.22 %: a false alarm has a probability below 1e-4 at ± 0.9 %.
    To first order in the errors, which are 10 %, the interval is exact.
    """
    generator = torch.Generator().manual_seed(0)
    a, common = torch.randn(2, 10_000, samples, generator=generator, dtype=torch.float64)
    b = correlation * a + math.sqrt(1 - correlation**2) * common
    pairs = zip(0.8 * (1 + 0.1 * a), 1 + 0.1 * b, strict=True)
    found = [estimates.ratio(x, y, independent=True) for x, y in pairs]
    assert share_covered(found, 0.8) == pytest.approx(0.95, abs=0.009)


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(12345.6, 0.0), "1.235e+04 ± 0"),
        (Estimate(1234.56, 12.0), "1235 ± 24"),
        (Estimate(1e-9, 1e-10), "1e-09 ± 2e-10"),
        (Estimate(0.5, math.nan), "0.5 ± nan"),
    ],
)
def test_text_has_two_digits_of_the_margin(estimate, text):
    assert str(estimate) == text


@pytest.mark.parametrize("shape", [(2, 2, 2), (0,), (5, 0)])
def test_samples_of_another_shape_raise(shape):
    with pytest.raises(ValueError, match="samples must have shape"):
        estimates.mean(torch.zeros(shape))


def test_series_of_different_shapes_raise():
    with pytest.raises(ValueError, match="must have the same shape, got \\(3,\\) and \\(4,\\)"):
        estimates.ratio(torch.zeros(3), torch.zeros(4))


def test_short_potential_raises():
    with pytest.raises(ValueError, match="potential must be a series of at least 2 steps"):
        estimates.telescoping_mean(0.0, torch.zeros(1))


def test_bad_confidence_and_degrees_of_freedom_raise():
    with pytest.raises(ValueError, match="confidence must lie"):
        Estimate(1.0, 0.1, confidence=1.0)
    with pytest.raises(ValueError, match=r"dof must be at least 1, got 0\.5"):
        student_quantile(0.95, 0.5)
