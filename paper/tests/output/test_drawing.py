"""The figure of a training run shows every parameter group, and gaps where values are missing."""

import math

import pytest

from equilibrate_paper.output import drawing

ROW = {"epoch": 1, "loss": 1.0, "left": 1.0, "right": 1.0, "lr": 0.1, "lowered": False}


def test_learning_rate_of_every_group_is_drawn():
    rows = [ROW | {"lr": [0.1, None]}, ROW | {"epoch": 2, "lr": [0.1, 0.01]}]
    *_, rate = drawing.training(rows).axes
    first, second = (line.get_ydata() for line in rate.lines)
    assert list(first) == [0.1, 0.1]
    assert list(second) == pytest.approx([math.nan, 0.01], nan_ok=True)


def test_undefined_values_leave_gaps(tmp_path):
    rows = [ROW | {"loss": None, "left": None, "right": None}, ROW | {"epoch": 2}]
    figure = drawing.training(rows)
    loss, sides, _ = figure.axes
    for line in (*loss.lines, *sides.lines[:2]):
        assert list(line.get_ydata()) == pytest.approx([math.nan, 1.0], nan_ok=True)
    path = drawing.save(figure, tmp_path / "new" / "figure.svg")
    assert "half-running averages" in path.read_text()
