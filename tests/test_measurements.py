"""Measurements of degenerate series. Error bars are tested in `test_relations.py`."""

import math

import pytest
import torch

from equilibrate.measurements import measure_series


def test_measurement_of_a_diverged_run_is_nan():
    series = torch.randn(100, generator=torch.Generator().manual_seed(0)).double()
    series[3] = math.nan
    found = measure_series(series, series.clone(), series.clone())
    assert not found.holds
    assert math.isnan(found.left.margin)
    assert math.isnan(found.residual)


def test_residual_of_a_measurement_without_fluctuations_is_nan():
    zeros = torch.zeros(50)
    assert math.isnan(measure_series(zeros, zeros, zeros).residual)
    assert measure_series(zeros + 1.5, zeros + 1).residual == pytest.approx(0.5)
