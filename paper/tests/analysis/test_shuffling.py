"""The curvature fitted to ratios of O_FB, with ratios made from a known curvature."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from paper_support.synthetic import write

from equilibrate.estimates import Estimate, student_quantile
from equilibrate.solvable import epoch_end_factor
from equilibrate_paper.analysis import measures, results, shuffling
from equilibrate_paper.protocol.profiles import PROFILES

PAPER = PROFILES["paper"].runs
LRS = np.array([0.003, 0.005, 0.01, 0.02, 0.05])


def closed_form(h, lr, batches):
    """The factor as the documentation states it."""
    r = 1 - lr * h
    weight = (1 + r) / (1 - r) * (1 - r**batches) / (batches * (1 + r**batches))
    return batches / (batches - 1) * (1 - weight)


def estimates(values, errors, dof=15):
    return {
        float(lr): Estimate(value, error, dof=dof)
        for lr, value, error in zip(LRS, values, errors, strict=True)
    }


@pytest.mark.parametrize("batches", [50, 600])
@pytest.mark.parametrize("curvature", [1.0, 5.7, 15.0])
@pytest.mark.parametrize("error", [1e-4, 0.01])
def test_a_known_curvature_is_fitted_back(curvature, batches, error):
    exact = [closed_form(curvature, lr, batches) for lr in LRS]
    found = shuffling.fit_curvature(estimates(exact, [error] * 5), batches)
    assert found is not None
    assert found.curvature == pytest.approx(curvature, rel=1e-4)
    assert found.chi_square == pytest.approx(0.0, abs=0.01)
    assert (found.dof, found.batches) == (4, batches)
    assert found.low < curvature < found.high
    assert found.factor(LRS) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_equals_its_naive_definition(seed):
    """All curvatures in steps of 0.05 %, and those with χ² up to t² above the smallest."""
    rng = np.random.default_rng(seed)
    errors = np.array([0.01, 0.015, 0.018, 0.029, 0.022])
    values = [closed_form(5.7, lr, 600) for lr in LRS] + errors * rng.normal(size=5)
    found = shuffling.fit_curvature(estimates(values, errors), 600)
    assert found is not None
    curvatures = np.exp(np.arange(math.log(1.0), math.log(19.0), 0.0005))
    chi_square = sum(
        ((value - closed_form(curvatures, lr, 600)) / error) ** 2
        for lr, value, error in zip(LRS, values, errors, strict=True)
    )
    inside = curvatures[chi_square <= chi_square.min() + student_quantile(0.95, 15) ** 2]
    assert found.chi_square == pytest.approx(chi_square.min(), abs=1e-4)
    assert found.curvature == pytest.approx(curvatures[chi_square.argmin()], rel=1e-3)
    assert (found.low, found.high) == pytest.approx((inside[0], inside[-1]), rel=1e-3)


def test_the_interval_covers_the_curvature():
    """2000 repetitions of the published runs: 16 seeds, each of which varies by 6 %.

    At a coverage of exactly 95 % the count is below 1870 with a probability of 0.1 %. Student's
    quantile makes the interval a little too wide, so that it may cover up to 98 %. χ² has four
    degrees of freedom. Its mean is 4·30/28, because each error is estimated with 30 degrees of
    freedom, within four standard errors of 0.07.
    """
    rng = np.random.default_rng(0)
    exact = np.array([closed_form(5.7, lr, 600) for lr in LRS])
    draws = 1 + 0.06 * rng.normal(size=(2, 2000, 5, 16))
    mean, square = draws.mean(-1), draws.var(-1, ddof=1) / 16
    quotient = mean[0] / mean[1]
    errors = exact * np.sqrt(square[0] + quotient**2 * square[1]) / mean[1]
    fits = [
        shuffling.fit_curvature(estimates(*each), 600)
        for each in zip(exact * quotient, errors, strict=True)
    ]
    covered = sum(fit is not None and fit.low <= 5.7 <= fit.high for fit in fits)
    assert 1870 <= covered <= 1960
    assert np.mean([fit.chi_square for fit in fits if fit]) == pytest.approx(4 * 30 / 28, abs=0.28)


def test_an_interval_without_an_upper_end():
    found = shuffling.fit_curvature(estimates([0.9, 0.95, 1, 1, 1], [0.04] * 5), 600)
    assert found is not None
    assert found.high == math.inf
    assert 0 < found.low < found.curvature < 20


def test_an_interval_without_a_lower_end():
    found = shuffling.fit_curvature(estimates([0, 0, 0, 0, 0.1], [0.1] * 5), 600)
    assert found is not None
    assert found.low == 0
    assert found.curvature < found.high < 1


@pytest.mark.parametrize(
    "ratios",
    [
        {},
        {0.003: Estimate(0.8, 0.01, dof=15)},
        estimates([0.8] * 5, [0.0] * 5),
        estimates([0.8] * 5, [math.nan] * 5),
        estimates([math.nan] * 5, [0.1] * 5),
        estimates([1.01] * 5, [0.01] * 5),
        estimates([-0.1] * 5, [0.01] * 5),
    ],
    ids=["none", "one", "no error", "unknown error", "no values", "too large", "too small"],
)
def test_ratios_that_determine_no_curvature(ratios):
    assert shuffling.fit_curvature(ratios, 600) is None


def recorded(folder, curvature=6.0, **options):
    """O_FB = η(1 + 10η) with independent batches, less by the factor with reshuffled ones."""
    for name in ("mlp-reshuffled", "mlp-independent"):

        def landscape(time, lr, arm, seed, shuffled=name == "mlp-reshuffled"):
            factor = closed_form(curvature, lr, 600) if shuffled else 1.0
            return factor * lr * (1 + 10 * lr) * (1 + 0.01 * (seed % 4 - 1.5))

        write(PAPER[name], folder, {"landscape": landscape}, **options)
    found = results.load(folder / "records")
    return found["mlp-reshuffled"], found["mlp-independent"]


def test_runs_are_compared_at_each_learning_rate(tmp_path):
    both = recorded(tmp_path)
    found = shuffling.ratios(*both)
    assert list(found) == pytest.approx(LRS.tolist())
    expected = epoch_end_factor(torch.from_numpy(6 * LRS), 600).tolist()
    assert [ratio.value for ratio in found.values()] == pytest.approx(expected)
    # 0.01 times the deviation of −1.5, −0.5, 0.5, 1.5, four times each, in both runs.
    relative = 0.01 * math.sqrt(20 / 15) / 4 * math.sqrt(2)
    assert found[0.003].stderr == pytest.approx(expected[0] * relative)
    fit = shuffling.fit_runs(*both)
    assert fit is not None
    assert (fit.curvature, fit.batches) == (pytest.approx(6.0, rel=1e-4), 600)


def test_learning_rates_that_are_not_finished_are_left_out(tmp_path):
    both = recorded(tmp_path, upto=550)
    assert list(shuffling.ratios(*both)) == [0.01, 0.02, 0.05]


def test_momentum_and_empty_records_have_no_fit(tmp_path):
    shuffled, independent = recorded(tmp_path)
    fast = replace(shuffled, run=replace(shuffled.run, momentum=0.9))
    assert shuffling.fit_runs(fast, independent) is None
    empty = replace(shuffled, rows=(), epoch=np.array([]))
    assert shuffling.fit_runs(empty, independent) is None


def test_change_from_the_largest_to_the_smallest_learning_rate(tmp_path):
    """Against a naive calculation; a part of the fluctuations is common to both η."""
    rng = np.random.default_rng(0)
    run = PAPER["mlp-independent"]
    noise = {seed: (rng.normal(), rng.normal()) for seed in run.seeds}

    def landscape(time, lr, arm, seed):
        common, own = noise[seed]
        return lr * (1 + 3 * lr) * (1 + 0.1 * common + 0.05 * own * (lr == 0.003))

    write(run, tmp_path, {"landscape": landscape})
    found = measures.landscape_change(results.load(tmp_path / "records")[run.name])
    small = [landscape(0, 0.003, "", seed) / 0.003 for seed in run.seeds]
    large = [landscape(0, 0.05, "", seed) / 0.05 for seed in run.seeds]
    ratio = sum(small) / sum(large)
    off = [a - ratio * b for a, b in zip(small, large, strict=True)]
    stderr = math.sqrt(sum(d * d for d in off) / 15 / 16) / (sum(large) / 16)
    assert found.value == pytest.approx(ratio - 1)
    assert found.margin == pytest.approx(student_quantile(0.95, 15) * stderr)


def test_one_learning_rate_has_no_change(tmp_path):
    shuffled, _ = recorded(tmp_path, upto=100)
    assert math.isnan(measures.landscape_change(shuffled).value)


def test_the_middle_of_a_phase(tmp_path):
    """Five rows in each phase: the second is the last one up to the middle."""
    write(PAPER["mlp-independent"], tmp_path, {"landscape": lambda t, *_: t}, rows=5)
    result = results.load(tmp_path / "records")["mlp-independent"]
    phase = result.phases()[-1]
    assert measures.halfway(phase, "landscape") == pytest.approx(np.full(16, 240.0))
    assert np.isnan(measures.halfway(phase, "loss")).all()
    begun = replace(phase, rows=phase.rows[2:])
    assert np.isnan(measures.halfway(begun, "landscape")).all()


def test_the_change_in_the_later_half_of_a_phase(tmp_path):
    """The column is at², with another factor a for each seed, so it becomes four times as large."""
    columns = {"right": lambda t, lr, arm, seed: (1 + seed % 3) * t**2}
    write(PAPER["mlp-independent"], tmp_path, columns, rows=6)
    phase = results.load(tmp_path / "records")["mlp-independent"].phases()[-1]
    found = measures.later_change(phase, "right")
    assert found.value == pytest.approx(3.0)
    assert found.margin == pytest.approx(0.0, abs=1e-6)
    assert math.isnan(measures.later_change(replace(phase, rows=phase.rows[3:]), "right").value)
