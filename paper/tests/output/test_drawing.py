"""The figure of a training run shows gaps where values are missing, and each lowering."""

import math

import pytest

from equilibrate_paper.output import drawing

ROW = {"epoch": 1, "loss": 1.0, "left": 1.0, "right": 1.0, "lrs": [0.1]}


def test_undefined_values_leave_gaps(tmp_path):
    rows = [ROW | {"loss": None, "left": None, "right": None}, ROW | {"epoch": 2, "lrs": [0.05]}]
    figure = drawing.training(rows, 0.1)
    loss, sides, rate = figure.axes
    for line in (*loss.lines, *sides.lines[:2]):
        assert list(line.get_ydata()) == pytest.approx([math.nan, 1.0], nan_ok=True)
    (lowered,) = sides.lines[2:]
    assert list(lowered.get_xdata()) == [2, 2]
    assert list(rate.lines[0].get_ydata()) == [0.1, 0.1]
    path = drawing.write_figure(figure, tmp_path / "new" / "figure.svg")
    assert "half-running averages" in path.read_text()
