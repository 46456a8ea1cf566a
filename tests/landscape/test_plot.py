"""The plot of a sweep, and that the rest of the package does not need matplotlib."""

import subprocess
import sys
from dataclasses import replace

import pytest
from support.synthetic_sweeps import synthetic

from equilibrate.landscape import fit, plot


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_plot_shows_points_line_and_departures():
    found = synthetic(bend=5.0)
    line = fit(found)
    curve, index = plot.draw(found, line, title="digits").axes
    assert curve.figure.get_suptitle() == "digits"
    assert legend(curve) == [f"slope up to $\\eta$ = {line.linear_up_to:g}", "measured, 95 %"]
    [drawn] = [x for x in curve.lines if str(x.get_label()).startswith("slope")]
    lrs = [point.lr for point in found.points]
    assert drawn.get_xdata() == pytest.approx(lrs)
    slope = line.hessian_noise.value / 2
    assert drawn.get_ydata() == pytest.approx([slope * lr for lr in lrs])
    assert "off the line" in legend(index)
    departed = index.containers[-1].lines[0]
    expected = {d.lr: d.index.value for d in line.departures if d.significant}
    assert dict(zip(departed.get_xdata(), departed.get_ydata(), strict=True)) == expected


def test_plot_marks_points_without_equilibrium():
    found = synthetic()
    first = replace(found.points[0], equilibrated=False)
    found = replace(found, points=(first, *found.points[1:]))
    curve, _ = plot.draw(found, fit(found)).axes
    assert "FDR1 does not hold" in legend(curve)


def test_plot_without_a_fit_shows_the_points_alone():
    found = synthetic()
    found = replace(found, points=tuple(replace(p, equilibrated=False) for p in found.points))
    [curve] = plot.draw(found, None).axes
    assert legend(curve) == ["FDR1 does not hold"]
    [drawn] = curve.lines
    assert drawn.get_ydata() == pytest.approx([p.estimate.value for p in found.points])


def test_plot_states_the_correction_for_reshuffling():
    found = synthetic(sampling="shuffled")
    curve, _ = plot.draw(found, fit(found)).axes
    assert any("corrected for reshuffling" in label for label in legend(curve))


def test_landscape_does_not_import_matplotlib():
    code = "import sys, equilibrate.landscape; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
