"""Every panel from records alone: what it shows is what stands in them."""

import numpy as np
import pytest
from experiments.synthetic import write

from equilibrate.experiments import figures, results
from equilibrate.experiments.panels import PANELS
from equilibrate.experiments.profiles import profile
from equilibrate.experiments.statistics import estimate


def side(time, lr, arm, seed):
    return lr + 1 / time


COLUMNS = {
    "landscape": {
        "left": side,
        "right": lambda time, lr, arm, seed: lr,
        "loss": lambda *_: 0.5,
        "batch_loss": lambda *_: 0.6,
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


def test_the_same_records_give_the_same_files(whole, tmp_path):
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


def test_a_sequence_has_both_sides_at_each_rate(whole):
    figure = figures.draw("2b", whole)
    assert len(figure.axes[0].lines) == 2 * 11
    words = texts(figure)
    assert all(f" {lr} " in f" {words} " for lr in ("0.05", "0.0015", "0.00025", "0.0001"))


def test_landscape_has_students_intervals_and_the_red_line(whole):
    main = figures.draw("3a", whole).axes[0]
    (bars,) = main.containers
    points = np.asarray(bars.lines[0].get_ydata())  # type: ignore[attr-defined]
    segments = bars.lines[2][0].get_segments()  # type: ignore[attr-defined]
    lrs = np.array([0.05, 0.02, 0.01, 0.005, 0.003])
    assert points == pytest.approx(1.15 * lrs)
    half_width = estimate(lrs[0] * (1 + 0.1 * np.arange(4))).half_width
    assert segments[0][1][1] - segments[0][0][1] == pytest.approx(2 * half_width)
    red = main.lines[-1]
    assert red.get_color() == "#d62728"
    x, y = np.asarray(red.get_xdata()), np.asarray(red.get_ydata())
    assert (x[0], y[0]) == (0, 0)
    assert y[1] / x[1] == pytest.approx(1.15)


def test_schedules_are_of_the_panels_seed(whole):
    for letter, seed in zip("abcd", range(4), strict=True):
        rate, loss, accuracy = figures.draw(f"S2{letter}", whole).axes
        assert loss.lines[0].get_label() == "preset"
        assert len(rate.lines) == len(loss.lines) == 3
        assert len(accuracy.lines) == 6
        assert np.asarray(accuracy.lines[0].get_ydata()) == pytest.approx(
            np.full(48, 0.9 + 0.01 * seed)
        )
        assert accuracy.lines[1].get_linestyle() != accuracy.lines[0].get_linestyle()


def test_incomplete_runs_say_what_they_show(tmp_path):
    short = recorded(tmp_path, epochs_scale=0.1, seeds=2)
    assert "mlp-sequence: 350 of 3500 epochs, 2 of 4 seeds" in texts(figures.draw("3a", short))
    stopped = recorded(tmp_path, upto=25)
    assert "mlp-initial: 25 of 100 epochs" in texts(figures.draw("1a", stopped))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("begun"), upto=45)


@pytest.mark.parametrize("panel", PANELS)
def test_a_run_that_has_just_begun_is_drawn(panel, begun):
    figure = figures.draw(panel, begun)
    assert " of " in texts(figure)
    if panel[0] == "3":
        assert "no learning rate is finished" in texts(figure)


def test_an_unknown_panel_is_refused(whole):
    with pytest.raises(ValueError, match="panel='5c' is unknown"):
        figures.draw("5c", whole)
