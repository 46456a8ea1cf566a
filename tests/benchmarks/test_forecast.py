"""The benchmark of forecasts runs at tiny sizes, and its records become tables and a figure."""

import json

import numpy as np
import pytest


@pytest.fixture
def page(load, tmp_path, monkeypatch):
    """The module that makes tables, with a page of its own."""
    table = load("forecast_table")
    path = tmp_path / "page.md"
    names = ("forecast", "what if", "ordering", "forecast tuned", "beginnings", "branches")
    path.write_text("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in names))
    monkeypatch.setattr(table, "PAGE", path)
    monkeypatch.setattr(table, "FIGURE", tmp_path / "figure.png")
    return table


@pytest.mark.parametrize("run", ["mlp:1", "gpt2:1:0.5"])
def test_a_tiny_run_is_recorded_and_drawn(load, page, tmp_path, run):
    load("forecast").main([run, "--tiny", "--schedules", "--out", str(tmp_path / "records")])
    (path,) = (tmp_path / "records").iterdir()
    record = json.loads(path.read_text())
    assert record["finished"]
    assert len(record["losses"]) == 240 + 60 + 49
    assert [len(row) for row in record["checks"]] == [1 + 1 + len(record["ages"])] * 6
    assert {b["horizon"] for b in record["branches"]} == {24, 60}
    assert set(record["schedules"]) == {"averaged", "cosine", "cosine to a tenth"}
    assert {key: len(losses) for key, losses in record["evaluations"].items()} == dict.fromkeys(
        ["240 264", "264 264", "240 300", "300 300"], 49
    )
    page.main(["--records", str(tmp_path / "records")])
    assert f"| {path.stem} | 240 | 60 | " in page.PAGE.read_text()
    assert page.FIGURE.stat().st_size > 10_000


def test_forecasts_know_nothing_of_what_comes_after(load, page, tmp_path):
    load("forecast").main(["mlp:1", "--tiny", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "mlp-1.json").read_text())
    before = [(b.gain, b.over, b.averaged, b.power_law) for b in page.branches("mlp-1", record)]
    record["losses"] = record["losses"][:240] + [9.0] * 109
    record["checks"] = [row if row[0] <= 240 else [row[0], *[9.0] * 5] for row in record["checks"]]
    record["products"] = [row if row[0] < 240 else [*row[:2], 9.0] for row in record["products"]]
    after = [(b.gain, b.over, b.averaged, b.power_law) for b in page.branches("mlp-1", record)]
    assert before == after


def test_packed_images_are_restored(load):
    pack_data = load("pack_data")
    random = np.random.default_rng(0)
    for shape in [(5, 1, 28, 28), (4, 3, 32, 32)]:
        images = random.integers(0, 256, shape, dtype=np.uint8)
        assert np.array_equal(pack_data.unpack(pack_data.pack(images)), images)


def test_the_share_that_cooldown_would_choose(load, page):
    """At the noise floor the whole second half, and the last fifth while nothing is known."""
    random = np.random.default_rng(0)
    own = 1 + random.normal(0, 0.01, 1000)
    checks = [[t, own[t], 0.0, 0.0, 0.0, own[t] - 0.5] for t in range(50, 1000, 50)]
    record = {"steps": 1000, "losses": own.tolist(), "checks": checks, "products": []}
    record["ages"] = [32, 128, 512, 0.05]
    assert page.chosen_share(record) == 0.5
    assert page.chosen_share(record | {"checks": checks[:2]}) == 0.2
