"""Tables and figure about runs of equal length, from records in which every number is known."""

import numpy as np
import pytest
from paper_support.synthetic import write

from equilibrate.report.numbers import format_estimate
from equilibrate.solvable import epoch_end_factor
from equilibrate_paper.analysis import results, shuffling
from equilibrate_paper.analysis.seeds import mean_over_seeds
from equilibrate_paper.output import equal_length, figures, tables
from equilibrate_paper.protocol.profiles import PROFILES

PAPER = PROFILES["paper"].runs
MLP = ("mlp-reshuffled", "mlp-independent")
CNN = ("cnn-sequence", "cnn-independent")
CURVATURE = 6.0


def made(folder, *names, factor=None, **options):
    """O_FB/η is 1 + 10η times (1 + 1/t), lowered by a factor with reshuffled batches."""
    for name in names:

        def landscape(time, lr, arm, seed, shuffled=PAPER[name].sampling == "shuffled"):
            lower = factor or epoch_end_factor(CURVATURE * lr, 600).item()
            seeds = 1 + 0.01 * (seed % 4 - 1.5)
            return (lower if shuffled else 1.0) * lr * (1 + 10 * lr) * (1 + 1 / time) * seeds

        sides = {"left": lambda *_: 1.0, "right": lambda *_: 1.0}
        write(PAPER[name], folder, sides | {"landscape": landscape}, **options)
    return results.load(folder / "records")


def number(cell):
    return float(cell.split(" ± ")[0].replace("−", "-"))


def test_changes_with_learning_rate_and_time(tmp_path):
    """η = 0.003 has 600 epochs, and 0.05 has 100."""
    table = equal_length.changes(made(tmp_path, *MLP), "mlp")
    assert table is not None
    assert table.heading == "Changes of O_FB/η with η and with time, MLP on MNIST"
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["mlp-independent"][:3] == ("independent", "16", "0.05 to 0.003")
    assert rows["mlp-independent"][4] == "600"
    lowered = {lr: epoch_end_factor(CURVATURE * lr, 600).item() for lr in (0.003, 0.05)}
    for name, small, large in (("independent", 1, 1), ("reshuffled", *lowered.values())):
        row = rows[f"mlp-{name}"]
        change = 1.03 * (1 + 1 / 600) * small / (1.5 * (1 + 1 / 100) * large) - 1
        assert number(row[3]) == pytest.approx(change, rel=0.005)
        seeds = 1.03 * small * (1 + 0.01 * (np.arange(16) % 4 - 1.5))
        assert row[5] == format_estimate(mean_over_seeds(seeds * (1 + 1 / 300)))
        assert row[6] == format_estimate(mean_over_seeds(seeds * (1 + 1 / 600)))
        expected = (1 + 1 / 600) / (1 + 1 / 300) - 1
        assert number(row[7]) == pytest.approx(expected, rel=0.005)


def test_earlier_runs_are_shown_with_those_of_equal_length(tmp_path):
    table = equal_length.changes(made(tmp_path, "mlp-sequence", "mlp-unbiased", *MLP), "mlp")
    assert table is not None
    assert [row[0] for row in table.rows] == ["mlp-sequence", "mlp-unbiased", *MLP]


def test_the_sequence_of_the_cnn_is_shown_once(tmp_path):
    table = equal_length.changes(made(tmp_path, *CNN), "cnn")
    assert table is not None
    assert [row[0] for row in table.rows] == [*CNN]


def test_a_run_with_one_finished_phase_has_no_changes(tmp_path):
    made(tmp_path, *MLP)
    table = equal_length.changes(made(tmp_path, MLP[0], upto=150), "mlp")
    assert table is not None
    assert [row[0] for row in table.rows] == ["mlp-independent"]
    assert table.heading.endswith("(incomplete – mlp-reshuffled: 150 of 1400 epochs)")


def test_the_curvature_is_shown_below_the_comparison(tmp_path):
    recorded = made(tmp_path, *MLP)
    headings = [table.heading for table in tables.numbers(recorded)]
    assert headings == [
        "Batches in runs of equal length, MLP on MNIST",
        "Changes of O_FB/η with η and with time, MLP on MNIST",
        "One curvature fitted to the ratios of O_FB, MLP on MNIST",
    ]
    table = equal_length.curvature(recorded, "mlp")
    fit = shuffling.fit_runs(*(recorded[name] for name in MLP))
    assert table is not None
    assert fit is not None
    (row,) = table.rows
    assert row == ("6.00", f"{fit.low:.2f} to {fit.high:.2f}", "0.0", "4")


def test_an_interval_without_an_upper_end_is_shown_as_such(tmp_path, monkeypatch):
    fit = shuffling.CurvatureFit(6.0, 2.0, float("inf"), 1.0, 4, 600)
    monkeypatch.setattr(shuffling, "fit_runs", lambda *_: fit)
    table = equal_length.curvature(made(tmp_path, *MLP), "mlp")
    assert table is not None
    assert table.rows[0][1] == "2.00 to ∞"


@pytest.mark.parametrize("names", [(), MLP[:1], MLP[1:]])
def test_both_runs_are_needed(tmp_path, names):
    recorded = made(tmp_path, *names) if names else {}
    for table in (equal_length.comparison, equal_length.changes, equal_length.curvature):
        assert table(recorded, "mlp") is None


def test_with_momentum_or_without_a_reduction_there_is_no_curvature(tmp_path):
    assert equal_length.curvature(made(tmp_path, *CNN), "cnn") is None
    assert equal_length.curvature(made(tmp_path, *MLP, factor=1.05), "mlp") is None


def test_the_figure_has_the_ratio_by_one_curvature(tmp_path):
    _, ratio = figures.draw("B4a", made(tmp_path, *MLP)).axes
    (line,) = [line for line in ratio.lines if line.get_color() == "#d62728"]
    lrs, percent = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    expected = [100 * (epoch_end_factor(CURVATURE * lr, 600).item() - 1) for lr in lrs]
    assert percent == pytest.approx(expected, abs=0.01)
    assert lrs[0] < 0.003 < 0.05 < lrs[-1]
    assert line.get_label() == "one curvature, $h$ = 6.0"


def test_the_figure_of_the_cnn_has_no_such_line(tmp_path):
    _, ratio = figures.draw("B4b", made(tmp_path, *CNN)).axes
    assert not [line for line in ratio.lines if line.get_color() == "#d62728"]
