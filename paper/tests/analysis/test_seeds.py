"""Estimates over few seeds; the intervals themselves are tested with `equilibrate.estimates`."""

import math

import numpy as np
import pytest

from equilibrate_paper.analysis.seeds import mean_over_seeds, ratio_over_seeds


def test_intervals_cover_as_often_as_stated():
    """4000 samples of four normal numbers: 95 % ± 0.35 %; false alarm below 1e-4 at ± 1.4 %."""
    samples = np.random.default_rng(0).normal(size=(4000, 4))
    covered = [mean_over_seeds(sample).covers(0.0) for sample in samples]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.014)


def test_confidence_widens_the_interval():
    values = np.array([1.0, 2.0, 3.0])
    assert mean_over_seeds(values, 0.99).margin == pytest.approx(9.924843 / math.sqrt(3))


def test_one_seed_has_no_interval_and_none_has_no_mean():
    assert mean_over_seeds(np.array([1.0])).value == 1.0
    assert math.isnan(mean_over_seeds(np.array([1.0])).margin)
    assert math.isnan(mean_over_seeds(np.array([])).value)


def test_views_of_arrays_are_accepted():
    """Columns of a table are not contiguous in memory, and may run backwards."""
    table = np.arange(12.0).reshape(4, 3)
    assert mean_over_seeds(table[::-1, 1]).value == 5.5
    assert ratio_over_seeds(2 * table[::-1, 1], table[::-1, 1]).value == 2.0
