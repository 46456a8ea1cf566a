"""The pure functions of the interactive page: scales, ticks, paths, numbers and colours."""

from importlib.resources import files

import pytest
from support.browser import evaluate

SOURCE = files("equilibrate.report").joinpath("templates/plot.js").read_text(encoding="utf-8")
COLOURS = "[3, 4, 5, 6, 7, 8, 9, 10].map((k) => [-k, k].map((t) => Plot.diverging(t / 10)))"
EXPECTED = {
    "Plot.extent([3, null, -1, NaN])": [-1, 3],
    "Plot.extent([null])": None,
    "Plot.bulk([...Array(40).keys(), 1e9, -1e9])": [1, 38],
    "Plot.padded([2, 2])": pytest.approx([1.88, 2.12]),
    "Plot.linearTicks(0, 1)": [0, 0.2, 0.4, 0.6, 0.8, 1],
    "Plot.linearTicks(-0.3, 0.31, 3)": [-0.2, 0, 0.2],
    "Plot.linearTicks(7, 7)": [7],
    "Plot.logTicks(0.03, 0.9)": [0.05, 0.1, 0.2, 0.5],
    "Plot.logTicks(1e-8, 1, 5)": [1e-8, 1e-6, 1e-4, 0.01, 1],
    "Plot.logTicks(1.1, 1.9)": [1.2, 1.4, 1.6, 1.8],
    "Plot.symlogTicks(-3, 40, 0.1)": [-1, -0.1, 0, 0.1, 1, 10],
    "Plot.apart([-1, -0.1, 0, 0.1, 1], (v) => 10 * v, 5)": [-1, 0, 1],
    "Plot.scale('linear', [0, 10], [100, 0]).map(2)": 80,
    "Plot.scale('log', [1, 100], [0, 10]).map(10)": pytest.approx(5),
    "Plot.scale('log', [1, 100], [0, 10]).map(0)": None,
    "Plot.scale('linear', [0, 1], [0, 1]).map(null)": None,
    "Plot.scale('symlog', [-2, 2], [0, 10], 0.01).map(0)": pytest.approx(5),
    "['linear', 'log', 'symlog'].map((k) => {const s = Plot.scale(k, [1, 9], [3, 700]);"
    "return s.invert(s.map(4))})": pytest.approx([4, 4, 4]),
    "Plot.linePath([0, 1, 2, 3], [1, null, 2, 3])": "M0.0,1.0h0.1M2.0,2.0L3.0,3.0",
    "Plot.linePath([], [])": "",
    "Plot.bandPath([0, 1, 2, 3], [0, 0, null, 0], [2, 3, 4, 5])": (
        "M0.0,2.0L1.0,3.0L1.0,0.0L0.0,0.0Z"
    ),
    "[-5, 1.4, 1.6, 3.1, 99].map((x) => Plot.nearest([1, 2, 4], x))": [0, 0, 1, 2, 2],
    "Plot.nearest([], 1)": -1,
    "Plot.borders([1, 2, 4])": [0.5, 1.5, 3, 5],
    "Plot.borders([7])": [6.5, 7.5],
    "[0, -1234567, 0.01234, -0.5, 1.5e-5, 2.34e7, null].map((v) => Plot.format(v))": [
        *("0", "−1,234,567", "0.0123", "−0.5", "1.50e−5", "23,400,000", "–"),
    ],
    "[[0.012345, 0.0021], [97.1, 3], [-0.2, 0.3], [-0.001, 0.3]].map((v) => "
    "Plot.plusMinus(...v))": [
        *("0.0123 ± 0.0021", "97.1 ± 3.0", "−0.20 ± 0.30", "0.00 ± 0.30"),
    ],
    "[[1.5, null], [1.5, 0], [null, 1], [2, 1e-9]].map((v) => Plot.plusMinus(...v))": [
        *("1.5", "1.5", "–", "2 ± 1.0e−9"),
    ],
    "Plot.shortNames(['net.layers.1.weight', 'net.layers.12.bias'])": ["1.weight", "12.bias"],
    "Plot.shortNames(['0.weight', '2.bias'])": ["0.weight", "2.bias"],
    "Plot.shortNames(['weight'])": ["weight"],
    "[12.34, 75, 3725].map(Plot.formatTime)": ["12.3 s", "1 min 15 s", "1 h 02 min"],
    "[0, 3, -9, null].map((r) => Plot.shade(r))": [0, 1, -1, None],
    "[2.9, 3, null].map((margin) => Plot.shade(3, margin))": [1, 0.35, 1],
    "[null, 0].map(Plot.diverging)": [None, [247, 247, 247]],
}


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    names = [*EXPECTED, COLOURS]
    expressions = ", ".join(f"({expression})" for expression in names)
    found = evaluate(f"{SOURCE}\n[{expressions}]", tmp_path_factory.mktemp("script"))
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("expression", EXPECTED)
def test_value(values, expression):
    assert values[expression] == EXPECTED[expression]


def test_colours_of_opposite_signs_differ_for_every_kind_of_colour_vision(values):
    """Equal residuals of opposite sign differ in blue, which the common deficiencies leave."""
    for (_, _, blue), (_, _, other) in values[COLOURS]:
        assert blue - other > 60
