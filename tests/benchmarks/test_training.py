"""The training study is redrawn from its records; its statistics are checked by hand."""

import math

import pytest


def test_published_tables_fit_the_records(load):
    training = load("training")
    results = load("training_study.results").Results(training.OUT)
    text = training.PAGE.read_text()
    assert training.with_tables(text, results) == text


def test_figures_are_drawn(load, tmp_path):
    training = load("training")
    results = load("training_study.results").Results(training.OUT)
    load("training_study.figures").draw_curves(results, "mlp", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_means_and_paired_differences_by_hand(load):
    statistics = load("training_study.statistics")
    found = statistics.mean([1.0, 2.0, 3.0])
    assert found.value == 2
    assert found.margin == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)  # t of 2 degrees
    ours, theirs = {0: 5.0, 1: 6.0, 2: 8.0, 9: 0.0}, {0: 4.0, 1: 4.0, 2: 5.0}
    better = statistics.paired(ours, theirs, lower_is_better=False)
    assert better.estimate.value == 2
    assert better.estimate.margin == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert better.verdict == "undecided"
    close = {0: 4.9, 1: 5.0, 2: 6.1}
    assert statistics.paired(close, theirs, lower_is_better=False).verdict == "better"
    assert statistics.paired(close, theirs, lower_is_better=True).verdict == "worse"
    assert statistics.paired({0: 1.0, 1: 2.0}, theirs, lower_is_better=True) is None


def test_p_values_and_discoveries_by_hand(load):
    statistics = load("training_study.statistics")
    estimate = statistics.mean([1.0, 2.0, 3.0])  # t = 2√3 with two degrees of freedom
    t = 2 * math.sqrt(3)
    assert statistics.p_value(estimate) == pytest.approx(1 - t / math.sqrt(2 + t**2), abs=1e-6)
    # Five tests at 5 %: the bounds are 1, 2, 3, 4 and 5 %.
    assert statistics.discoveries([0.001, 0.5, 0.029, 0.025, 0.2]) == {0, 2, 3}
    assert statistics.discoveries([0.02, 0.5, 0.6]) == set()
