"""A record that others wrote: what has a wrong type is left out, what cannot be read is named."""

import json
import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibrate.cli import main
from equilibrate.report.live import view
from equilibrate.report.page import render
from equilibrate.report.run import Run, load

ROW = {
    "step": 100,
    "time": 1e9,
    "epoch": 1,
    "loss": 0.5,
    "lrs": [0.1, 0.2],
    "left": 1.0,
    "right": 0.9,
    "residual": 0.1,
    "stderr": 0.02,
    "margin": 0.04,
    "count": 50,
    "forecast": {"horizon": 20, "now": 0.5, "after": 0.4, "after_margin": 0.1, "staying": 0.5},
    "decisions": [{"step": 99, "lowered": True, "reason": "it pays", "lrs": [0.1, 0.2]}],
    "layers": {"w": {"residual": 0.1, "margin": 0.2, "state": "norm falls", "left": 1.0}},
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(10**400), 10**400)
    | st.text(st.characters(categories=["L", "N", "Cs", "Cc"]), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["step", "w"]), inner)
    ),
    max_leaves=4,
)


def places(value, before=()):
    """The place of each part of a row, as a sequence of keys."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        yield (*before, key)
        if isinstance(part, dict | list):
            yield from places(part, (*before, key))


def with_value(row, place, value):
    row = json.loads(json.dumps(row))
    part = row
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    return row


def drawn(html):
    """The data of a page, read as strictly as a browser does."""

    def refuse(constant):
        raise AssertionError(constant)

    (text,) = re.findall('<script type="application/json" id="data">(.*?)</script>', html)
    return json.loads(text, parse_constant=refuse)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*places(ROW)]), VALUES, st.booleans())
def test_a_value_of_any_type_is_shown_or_left_out(place, value, is_last):
    rows = [ROW, with_value(ROW, place, value)]
    run = Run("mine", {}, {})
    for row in rows if is_last else rows[::-1]:
        run.add(row)
    assert drawn(render(run))["loss"].count(0.5) >= 1
    assert "mine" in view(run, width=80)


@pytest.mark.parametrize(
    "wrong",
    ['"step": NaN', '"lrs": "0.1"', '"decisions": [{}]', '"time": 1e999', '"layers": {"w": [1]}'],
)
def test_values_of_a_wrong_type_are_told_on_the_page(tmp_path, wrong, capsys):
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"config": {{}}, "environment": {{}}}}\n{{"loss": 0.5, {wrong}}}\n')
    main(["report", str(tmp_path)])
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert drawn(html)["loss"] == [0.5]
    assert ("values of a wrong type are left out" in html) == ("NaN" not in wrong)  # NaN is null
    main(["watch", "--once", str(path)])
    assert "loss  0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1" * 5000, r"damaged in line 2 \(Exceeds the limit"),
        ("[" * 100_000, r"damaged in line 2 \(maximum recursion depth exceeded"),
        ('{"config": 1, "environment": {}}', "is not a record of equilibrate"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path, line, words):
    path = tmp_path / "train.jsonl"
    header = "" if "config" in line else '{"config": {}, "environment": {}}\n'
    path.write_text(f"{header}{line}\n")
    for command in (["report"], ["watch", "--once"]):
        with pytest.raises(SystemExit, match=f"equilibrate: .*{words}"):
            main([*command, str(path)])


def test_the_end_may_be_anything(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"config": {}, "environment": {}}\n{"loss": 1}\n{"end": 3}\n')
    assert "? · ? · 1 row<" in render(load(path))


def test_text_that_is_none_is_written_with_question_marks(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"config": {"a": "\\udcff"}, "environment": {}}\n{"loss": 1}\n')
    main(["report", str(path), "--title", "a\udcffb"])
    assert "<h1>a?b</h1>" in path.with_suffix(".html").read_text(encoding="utf-8")


def test_the_memory_for_a_long_record_is_bounded(tmp_path):
    """Rows are thinned while they are read: all of them would take 40 MB."""
    path = tmp_path / "train.jsonl"
    with path.open("w") as file:
        file.write('{"config": {}, "environment": {}}\n')
        for step in range(1, 20_001):
            file.write(json.dumps(ROW | {"step": step}) + "\n")
    tracemalloc.start()
    try:
        run = load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert run is not None
    assert run.recorded == 20_000
    assert peak < 10e6
