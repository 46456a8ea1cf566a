"""The benchmark of forecasts runs at tiny sizes, and its records become a table and a figure."""

import json
from dataclasses import replace

import numpy as np
import pytest


def test_a_tiny_run_is_recorded_resumed_and_drawn(load, tmp_path):
    forecast, figure = load("forecast"), load("forecast_figure")
    task = replace(forecast.TASKS["mlp"], times=(64,), batch_size=8, examples=16)
    out = tmp_path / "mlp-0.json"
    settings = {"data": None, "out": out, "deadline": float("inf"), "every": 4, "tiny": True}
    forecast.run(task, "mlp", 0, horizons=(16, 20), **settings)
    record = json.loads(out.read_text())
    (branch,) = record["branches"]
    assert record["finished"]
    assert [row["step"] for row in record["trunk"]] == [50]
    assert set(branch["cooldown"]) == set(branch["constant"]) == {"16", "20"}
    longer = replace(task, times=(64, 68))
    forecast.run(longer, "mlp", 0, horizons=(16, 20), **settings)
    branches = json.loads(out.read_text())["branches"]
    assert branches[0] == branch  # not made again
    assert [b["step"] for b in branches] == [64, 68]
    found = list(figure.points(json.loads(out.read_text())))
    assert len(found) == 4
    assert "| MLP | 64 | 16 |" in figure.table(found)
    figure.draw(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_packed_images_are_restored(load):
    pack_data = load("pack_data")
    random = np.random.default_rng(0)
    for shape in [(5, 1, 28, 28), (4, 3, 32, 32)]:
        images = random.integers(0, 256, shape, dtype=np.uint8)
        assert np.array_equal(pack_data.unpack(pack_data.pack(images)), images)


def test_a_dry_run_cannot_overwrite_measured_results(load, capsys):
    with pytest.raises(SystemExit):
        load("forecast").main(["--dry-run"])
    assert "cannot overwrite measured results" in capsys.readouterr().err
