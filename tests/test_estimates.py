"""Error bars against scipy, against hand counts, and by how often they cover the truth."""

import math

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibrate import estimates
from equilibrate.estimates import Estimate, student_quantile


@given(st.floats(0.01, 0.999), st.integers(1, 1000))
def test_student_quantile_is_scipys(confidence, freedom):
    exact = scipy.stats.t.ppf((1 + confidence) / 2, freedom)
    assert student_quantile(confidence, freedom) == pytest.approx(exact, rel=1e-9)


def test_student_quantile_goes_over_into_the_normal_one():
    assert student_quantile(0.95, math.inf) == pytest.approx(1.959963984540054, rel=1e-12)
    assert student_quantile(0.95, 1001) == pytest.approx(student_quantile(0.95, 1000), rel=2e-3)
    assert student_quantile(0.95, 2.9) == student_quantile(0.95, 2)  # to the safe side


@given(st.integers(1, 200), st.integers(0, 100))
def test_mean_written_out(steps, seed):
    series = torch.randn(steps, generator=torch.Generator().manual_seed(seed))
    found = estimates.mean(series)
    assert found.value == pytest.approx(series.double().mean().item(), rel=1e-12, abs=1e-12)
    assert found.count == steps
    batches = 20 if steps >= 40 else steps
    length = steps // batches
    kept = series.tolist()[steps - batches * length :]
    means = [sum(kept[k * length : (k + 1) * length]) / length for k in range(batches)]
    if batches == 1:
        assert math.isnan(found.error)
        return
    centre = sum(means) / batches
    variance = sum((m - centre) ** 2 for m in means) / (batches - 1)
    assert found.error == pytest.approx(math.sqrt(variance / batches), rel=1e-6)
    assert found.freedom == batches - 1


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


def test_batch_means_cover_the_truth_of_a_correlated_series():
    """2,000 series, correlation time 9: an exact interval leaves 93–97 % once in 20,000."""
    series = autoregressive(4000, 2000, memory=0.8, seed=0)
    assert 0.93 < share_covered([estimates.mean(x) for x in series.T], 0.0) < 0.97
    naive = (series.mean(0).abs() <= 1.96 * series.std(0) / math.sqrt(len(series))).double().mean()
    assert naive < 0.6  # what taking the steps for independent would give


def test_runs_cover_the_truth_however_correlated_they_are():
    groups = autoregressive(50, 8000, memory=0.95, seed=1).split(4, dim=1)
    assert 0.93 < share_covered([estimates.mean(x) for x in groups], 0.0) < 0.97


def test_a_ratio_covers_the_truth():
    b = 2 + autoregressive(4000, 2000, memory=0.5, seed=2) / 4
    a = 3 * b + autoregressive(4000, 2000, memory=0.5, seed=3)
    found = [estimates.ratio(x, y) for x, y in zip(a.T, b.T, strict=True)]
    assert 0.93 < share_covered(found, 3.0) < 0.97


def test_arithmetic_of_estimates():
    one = Estimate(1.0, 0.1, 50, "by hand", freedom=4)
    assert one.margin == pytest.approx(2.7764451 * 0.1)
    assert one.scaled(-3) == Estimate(-3.0, 0.1 * 3, 50, "by hand", freedom=4)
    assert one.agrees(Estimate(1.3, 0.1, 50, "by hand"))
    assert not one.agrees(Estimate(1.4, 0.1, 50, "by hand"))
    assert str(Estimate(12345.6, 0.0, 3, "exact")) == "1.235e+04 ± 0"
    assert str(Estimate(1234.56, 12.0, 3, "")) == "1235 ± 24"
    assert str(Estimate(1e-9, 1e-10, 3, "")) == "1e-09 ± 2e-10"


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="samples must have shape"):
        estimates.mean(torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match="samples must have shape"):
        estimates.mean(torch.zeros(0))
    with pytest.raises(ValueError, match="samples must have shape"):
        estimates.mean(torch.zeros(5, 0))
    with pytest.raises(ValueError, match="measured together"):
        estimates.ratio(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="at least 2 steps"):
        estimates.of_drift(0.0, torch.zeros(1))
    with pytest.raises(ValueError, match="confidence must lie"):
        student_quantile(1.0, 3)
    with pytest.raises(ValueError, match="freedom must be"):
        student_quantile(0.95, 0.5)
