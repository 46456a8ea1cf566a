"""Reshuffled and independent batches in runs of equal length: verdicts and figure."""

import pytest
from paper_support.synthetic import write

from equilibrate_paper.analysis import findings, results
from equilibrate_paper.analysis.verdicts import grouped, judge
from equilibrate_paper.output import figures
from equilibrate_paper.protocol.profiles import PROFILES

PAPER = PROFILES["paper"].runs
RUNS = {"mlp": ("mlp-reshuffled", "mlp-independent"), "cnn": ("cnn-sequence", "cnn-independent")}


def noise(seed: int, size: float) -> float:
    return size * (seed % 4 - 1.5)


def both(task, folder, factor=1.0, spread=0.001, residual=0.01, bend=0.0, **options):
    """Write O_FB = η(1 + bend·η), times a factor with reshuffled batches."""
    for name, scale in zip(RUNS[task], (factor, 1.0), strict=True):

        def landscape(time, lr, arm, seed, scale=scale):
            return scale * lr * (1 + bend * lr) * (1 + noise(seed, spread))

        columns = {
            "left": lambda time, lr, arm, seed: 1 + residual + noise(seed, spread),
            "right": lambda *_: 1.0,
            "landscape": landscape,
        }
        write(PAPER[name], folder, columns, **options)
    return results.load(folder / "records")


def verdicts(recorded):
    return {claim.id: claim for claim in judge(recorded)}


def test_they_are_left_out_until_their_runs_are_recorded(tmp_path):
    assert not any(claim.id.startswith("equal-length") for claim in judge({}))
    recorded = both("mlp", tmp_path)
    found = {name for name in verdicts(recorded) if name.startswith("equal-length")}
    assert {name.rsplit("-", 1)[1] for name in found} == {"mlp"}
    assert len(found) == 4
    only = {"mlp-independent": recorded["mlp-independent"]}
    assert {claim.id for claim in judge(only) if "equal-length" in claim.id} == {
        "equal-length-meet-mlp",
        "equal-length-independent-linear-mlp",
    }
    (shown,) = grouped(judge(recorded), ["B4a"])
    assert shown.heading == "Claims beyond the paper"


@pytest.mark.parametrize(
    ("factor", "spread", "verdict"),
    [(0.9, 0.001, "holds"), (1.1, 0.001, "fails"), (0.99, 0.2, "undecided")],
)
@pytest.mark.parametrize("task", ["mlp", "cnn"])
def test_effect_of_shuffling(tmp_path, task, factor, spread, verdict):
    found = verdicts(both(task, tmp_path, factor, spread))
    claim = found[f"equal-length-lowers-{task}"]
    assert (claim.verdict, claim.measured) == (verdict, pytest.approx(factor - 1, abs=0.002))
    if task == "cnn":
        opposite = {"holds": "fails", "fails": "holds"}
        assert found["equal-length-larger-cnn"].verdict == opposite.get(verdict, verdict)


@pytest.mark.parametrize(("residual", "verdict"), [(0.01, "holds"), (0.08, "fails")])
def test_sides_of_the_run_with_independent_batches(tmp_path, residual, verdict):
    found = verdicts(both("mlp", tmp_path, residual=residual))
    assert found["equal-length-meet-mlp"].verdict == verdict


@pytest.mark.parametrize(("bend", "verdict"), [(0.0, "holds"), (60.0, "fails")])
def test_linearity(tmp_path, bend, verdict):
    """(1 + 60·0.01)/(1 + 60·0.003) − 1 = 0.36."""
    found = verdicts(both("mlp", tmp_path, bend=bend))
    for batches in ("reshuffled", "independent"):
        assert found[f"equal-length-{batches}-linear-mlp"].verdict == verdict


def test_learning_rates_between_two_are_compared(tmp_path):
    """O_FB is doubled by reshuffling inside the range and halved outside of it."""
    inside = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005)

    def landscape(time, lr, arm, seed):
        return 2.0 if lr in inside else 0.5

    write(PAPER["cnn-sequence"], tmp_path, {"landscape": landscape})
    write(PAPER["cnn-independent"], tmp_path, {"landscape": lambda *_: 1.0})
    recorded = results.load(tmp_path / "records")
    measure = findings.shuffling_effect_between(0.0005, 0.005)
    (found,) = measure(*(recorded[name] for name in RUNS["cnn"]))
    assert (found.value, found.margin) == (pytest.approx(1.0), pytest.approx(0.0))
    write(PAPER["cnn-independent"], tmp_path, {"landscape": lambda *_: 1.0}, upto=3000)
    recorded = results.load(tmp_path / "records")
    assert measure(*(recorded[name] for name in RUNS["cnn"])) == []  # η = 0.0005 is not finished


def test_figure_shows_both_runs_and_their_ratio(tmp_path):
    figure = figures.draw("B4a", both("mlp", tmp_path, factor=0.9))
    values, ratio = figure.axes
    shuffled, independent = (c.lines[0].get_ydata() for c in values.containers)
    assert list(shuffled) == pytest.approx([0.9] * 5)
    assert list(independent) == pytest.approx([1.0] * 5)
    (points,) = (c.lines[0].get_ydata() for c in ratio.containers)
    assert list(points) == pytest.approx([-10.0] * 5)
