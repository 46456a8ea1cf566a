"""All panels show what is in the records."""

from dataclasses import replace

import numpy as np
import pytest
from paper_support.synthetic import write

from equilibrate_paper.analysis import results
from equilibrate_paper.analysis.seeds import mean_over_seeds
from equilibrate_paper.output import figures
from equilibrate_paper.protocol.panels import PANELS
from equilibrate_paper.protocol.profiles import profile
from equilibrate_paper.protocol.schedules import PiecewiseConstant


def side(time, lr, arm, seed):
    return lr + 1 / time


COLUMNS = {
    "landscape": {
        "left": side,
        "right": lambda time, lr, arm, seed: lr,
        "loss": lambda *_: 0.5,
        "batch_loss": lambda *_: 0.6,
        "norm_square": lambda *_: 20.0,
        "step_norm_square": lambda *_: 30.0,
        "landscape": lambda time, lr, arm, seed: lr * (1 + 0.1 * (seed % 4)),
    },
    "performance": {
        "lr": lambda time, lr, arm, seed: lr,
        "train_loss": lambda time, lr, arm, seed: 1 / time + 0.1 * seed + len(arm),
        "train_accuracy": lambda time, lr, arm, seed: 0.9 + 0.01 * seed,
        "test_accuracy": lambda time, lr, arm, seed: 0.8 + 0.01 * seed,
    },
}


def recorded(folder, epochs_scale=1.0, seeds=None, upto=float("inf")):
    for run in profile("paper", epochs_scale, seeds).runs.values():
        write(run, folder, COLUMNS[run.measures], upto=upto)
    return results.load(folder / "records")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("whole"))


def texts(figure):
    import matplotlib.text

    return " ".join(t.get_text() for t in figure.findobj(matplotlib.text.Text))


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_is_drawn_to_both_formats(panel, whole, tmp_path):
    png, svg = figures.save(panel, whole, tmp_path)
    assert (png.name, svg.name) == (f"fig{panel}.png", f"fig{panel}.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "incomplete" not in texts(figures.draw(panel, whole))
    assert figures.caption(panel, whole).startswith(("MLP on MNIST", "CNN on CIFAR-10"))


def test_the_same_records_give_identical_files(whole, tmp_path):
    for name in ("one", "two"):
        figures.save("3b", whole, tmp_path / name)
    for file in ("fig3b.png", "fig3b.svg"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_sides_are_drawn_as_recorded(whole):
    loss, sides = figures.draw("1a", whole).axes
    left, right = sides.lines
    time = np.asarray(left.get_xdata(), dtype=float)
    assert np.asarray(left.get_ydata()) == pytest.approx(0.1 + 1 / time)
    assert np.asarray(right.get_ydata()) == pytest.approx(np.full(12, 0.1))
    assert (sides.get_xscale(), sides.get_yscale(), loss.get_yscale()) == ("log", "log", "log")


def points(container):
    """Means, and lower and upper ends of the intervals."""
    segments = np.array(container.lines[2][0].get_segments())
    return np.asarray(container.lines[0].get_ydata()), segments[:, 0, 1], segments[:, 1, 1]


def test_landscape_has_intervals_and_the_red_line(whole):
    alone = {name: result for name, result in whole.items() if name != "mlp-unbiased"}
    main = figures.draw("3a", alone).axes[0]
    (bars,) = main.containers
    mean, low, high = points(bars)
    lrs = np.array([0.003, 0.005, 0.01, 0.02, 0.05])
    assert mean == pytest.approx(1.15 * lrs)
    margin = mean_over_seeds(lrs[0] * (1 + 0.1 * np.arange(4))).margin
    assert high[0] - low[0] == pytest.approx(2 * margin)
    (red,) = [
        line for line in main.lines if line.get_color() == "#d62728" and len(line.get_xdata())
    ]
    x, y = np.asarray(red.get_xdata()), np.asarray(red.get_ydata())
    assert (x[0], y[0]) == (0, 0)
    assert y[1] / x[1] == pytest.approx(1.15)
    assert "independent" not in texts(figures.draw("3a", alone))


def test_independent_batches_are_drawn_with_the_reshuffled(whole):
    figure = figures.draw("3a", whole)
    shuffled, independent = figure.axes[0].containers
    assert points(shuffled)[0] == pytest.approx(1.15 * np.array([0.003, 0.005, 0.01, 0.02, 0.05]))
    seeds = np.array(whole["mlp-unbiased"].run.seeds)
    expected = (1 + 0.1 * (seeds % 4)).mean() * np.array([0.003, 0.005, 0.01, 0.02, 0.05])
    assert points(independent)[0] == pytest.approx(expected)
    assert independent.lines[0].get_markerfacecolor() == "none"
    words = texts(figure)
    assert "reshuffled batches, 95 % interval" in words
    assert "independent batches, 95 % interval" in words


@pytest.mark.parametrize(
    ("heights", "insets"),
    [
        ((0.2, 0.4, 0.6, 1.0), 1),  # a line leaves room above
        ((0.9, 0.9, 0.9, 1.0), 1),  # a plateau leaves room below
        ((0.9, 0.9, 0.3, 1.0), 0),
    ],
)
def test_an_inset_hides_no_point(tmp_path, heights, insets):
    lrs = (0.01, 0.02, 0.03, 0.05)
    run = replace(
        profile("paper").runs["mlp-sequence"],
        arms={"sequence": PiecewiseConstant(tuple((lr, 10) for lr in lrs))},
        full_epochs=0,
    )
    shape = dict(zip(lrs, heights, strict=True))
    columns = COLUMNS["landscape"] | {"landscape": lambda time, lr, arm, seed: shape[lr]}
    write(run, tmp_path, columns)
    main = figures.draw("3a", results.load(tmp_path / "records")).axes[0]
    assert len(main.child_axes) == insets
    (_, right), (low, high) = main.get_xlim(), main.get_ylim()
    for lr, height in shape.items():
        x, y = lr / right, (height - low) / (high - low)
        for inset in main.child_axes:
            box = inset.get_position().transformed(inset.figure.transFigure)
            assert not box.transformed(main.transAxes.inverted()).contains(x, y)


def test_a_grid_shows_its_numbers_and_frames_the_settings_of_the_paper(whole, tmp_path):
    def accuracy(time, lr, arm, seed):
        x, y = (float(part.split("=")[1]) for part in arm.split(", "))
        return (0.9 if time <= 100 * y else 0.95) + x / 10

    run = profile("paper").runs["mlp-grid"]
    write(run, tmp_path, {"test_accuracy": accuracy}, rows=400)
    figure = figures.draw("B1a", results.load(tmp_path / "records"))
    final, epochs = figure.axes
    cells = {tuple(text.get_position()): text.get_text() for text in final.texts}
    assert cells[1, 1] == "95.10"  # Y = 0.1, X = 0.01
    assert cells[3, 3] == "96.00"
    cells = {tuple(text.get_position()): text.get_text() for text in epochs.texts}
    # A step of 5 points leaves the mean of five epochs after the fifth.
    assert [cells[column, 0] for column in range(4)] == ["10", "15", "35", "55"]
    assert [patch.get_xy() for patch in final.patches] == [(0.54, 0.54), (1.54, 2.54)]


def test_incomplete_runs_state_their_epochs_and_seeds(tmp_path):
    short = recorded(tmp_path, epochs_scale=0.1, seeds=2)
    assert "mlp-sequence: 350 of 3500 epochs, 2 of 4 seeds" in texts(figures.draw("3a", short))
    stopped = recorded(tmp_path, upto=25)
    assert "mlp-initial: 25 of 100 epochs" in texts(figures.draw("1a", stopped))


def test_figure_1_has_the_l2_term(whole):
    loss = figures.draw("1a", whole).axes[0]
    curves = {line.get_label(): line.get_ydata()[-1] for line in loss.lines}
    assert curves == pytest.approx({"cross-entropy": 0.5, "$f^B$": 0.75, r"$\overline{f^B}$": 0.6})
