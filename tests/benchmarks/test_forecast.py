"""The benchmark of forecasts runs at tiny sizes, and its records become tables and a figure."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import equilibrate as eq


@pytest.fixture
def page(load, tmp_path, monkeypatch):
    """The module that makes tables, with a page of its own."""
    table = load("forecast_table")
    path = tmp_path / "page.md"
    names = ["forecast", "errors", "what if", "ordering", "confirmation", "regrets"]
    path.write_text("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in names))
    monkeypatch.setattr(table, "PAGE", path)
    monkeypatch.setattr(table, "FIGURE", tmp_path / "figure.png")
    return table


@pytest.mark.parametrize("run", ["mlp:51", "gpt2:72:0.5"])
def test_a_tiny_run_is_recorded_and_drawn(load, page, tmp_path, run):
    load("forecast").main([run, "--tiny", "--schedules", "--out", str(tmp_path / "records")])
    (path,) = (tmp_path / "records").glob("*.json")
    record = json.loads(path.read_text())
    assert record["finished"]
    assert len(record["losses"]) == 240 + 60 + 48
    assert [row[0] for row in record["comparisons"]] == [49, 99, 149, 199, 249, 299]
    assert all(age < step for step, age, *_ in record["products"])
    cooldowns = [b for b in record["branches"] if b["kind"] == "cooldown"]
    assert {b["horizon"] for b in cooldowns} == {24, 30, 60}
    assert all(len(b["coming"]) == 8 and b["held_out_staying"] > 0 for b in cooldowns)
    assert set(record["schedules"]) == {"averaged", "Cooldown", "cosine", "cosine to a tenth"}
    assert 1 <= record["decays"]["Cooldown"] <= 150
    page.main(["--records", str(tmp_path / "records")])
    confirmed = f"{record['schedules']['Cooldown']:.4f} ({record['decays']['Cooldown'] / 300:.2g})"
    assert confirmed in page.PAGE.read_text()
    assert f"| {path.stem} | 240 | 60 | " in path.with_name("branches.md").read_text()
    assert page.FIGURE.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["mlp", "text"])
def test_branches_leave_no_trace_in_the_trunk(load, name):
    tasks, forecast = load("forecast_tasks"), load("forecast")
    task = replace(tasks.TASKS[name], batch_size=8, warm_up=0, evaluated=8)

    def trained(*, branched):
        training = tasks.Training(task, task.data(None, True), 1, tiny=True)
        scheduler = eq.Cooldown(training.optimizer, 1000, model=training.model)
        for step in range(200):
            if branched and step == 150:
                with forecast.returning(training, scheduler) as saved:
                    first, again = (
                        forecast.branch(training, saved, "cooldown", step, 30) for _ in range(2)
                    )
                assert first == again
            scheduler.step(training.train(), training.again)
        return list(training.model.parameters()), scheduler.forecaster.outcomes(200).noise

    for a, b in zip(*(trained(branched=branched)[0] for branched in (False, True)), strict=True):
        assert torch.equal(a, b)
    assert trained(branched=False)[1] == trained(branched=True)[1]


def test_forecasts_know_nothing_of_what_comes_after(load, page, tmp_path):
    load("forecast").main(["mlp:1", "--tiny", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "mlp-1.json").read_text())

    def forecasts():
        found = [b for b in page.branches("mlp-1", record) if b.step == 240]
        return [(b.gain, b.over, b.averaged, b.power_law) for b in found]

    before = forecasts()
    assert len(before) == 2
    record["losses"][240:] = [9.0] * 108
    record["comparisons"] = [r if r[0] < 240 else [*r[:2], 9.0, 8.0] for r in record["comparisons"]]
    record["products"] = [r if r[0] < 240 else [*r[:2], 9.0, 1.0] for r in record["products"]]
    assert before == forecasts()


def test_a_gain_is_measured_on_the_batches_of_the_trunk(load):
    """A trunk whose loss falls by 1 in 1,000 steps, on batches that differ by up to 0.3, and a
    cooldown over 200 steps that ends 0.5 below it, and learns nothing on the batches after it."""
    random = np.random.default_rng(0)
    harder = random.uniform(-0.3, 0.3, 1100)
    losses = 3 - np.arange(1100) / 1000 + harder
    coming = (2.2 + harder[800:864] - 0.5).tolist()
    made = {"step": 600, "horizon": 200, "kind": "cooldown", "coming": coming}
    realised = load("forecast_records").realised
    gain, over = realised({"losses": losses.tolist()}, made)
    assert over == pytest.approx(0.5, abs=0.005)
    assert gain == pytest.approx(0.7, abs=0.06)
    assert np.isnan(
        load("forecast_records").realised({"losses": losses[:850].tolist()}, made)
    ).all()


def test_a_branch_that_trains_on_is_compared_step_by_step(load):
    """The trunk learns 0.03 meanwhile, and so does the branch; the curve is off by 0.6 % of 0.2."""
    losses = 3 - np.arange(1100) / 1000
    made = {"step": 600, "horizon": 200, "kind": "half", "coming": (losses[800:864] - 0.1).tolist()}
    gain, over = load("forecast_records").realised({"losses": losses.tolist()}, made)
    assert over == pytest.approx(0.1)
    assert gain == pytest.approx(0.3, abs=0.003)


def test_the_momentum_of_an_annealing_law_is_that_of_its_definition(load):
    """Each step's lowering decays by λ at every later step; summed one by one."""
    for lowered, momentum in zip(
        load("forecast_rivals").with_momentum(), (0.9, 0.98, 0.99), strict=False
    ):
        n, found, kept = 150, 0.0, 0.0
        for _ in range(n):
            kept = momentum * kept + 0.1 / n
            found += kept
        assert lowered(0.1, np.array([n])).item() == pytest.approx(found)


def test_annealing_laws_find_their_own_constants(load):
    """Of losses made by each law, a cooldown that was not fitted is told within 2 %."""
    rivals = load("forecast_rivals")
    for terms in (rivals.with_momentum, rivals.multi_power):
        lowered = list(terms())[4]
        law = rivals.AnnealingLaw(np.array([2.0, 3.0, 1.0]), 0.5, lowered)
        losses = law.terms(0.1, np.arange(1, 1101), np.zeros(1100)) @ law.weights
        moments = [(300, 100), (300, 300), (600, 50), (600, 400)]
        gains = {(step, n): law.gain(0.1, step, n) for step, n in moments}
        found = rivals.fit_law(losses, 0.1, gains, terms())
        assert found.gain(0.1, 800, 200) == pytest.approx(law.gain(0.1, 800, 200), rel=0.02)


def test_packed_images_are_restored(load):
    """But for the lowest three bits of a pixel."""
    pack_data = load("pack_data")
    random = np.random.default_rng(0)
    for shape in [(5, 1, 28, 28), (4, 3, 32, 32)]:
        images = random.integers(0, 256, shape, dtype=np.uint8)
        assert np.array_equal(pack_data.unpack(pack_data.pack(images)), images & 0b11111000)


def test_the_cost_is_measured_in_blocks(load, tmp_path):
    path = tmp_path / "cost.json"
    load("forecast_cost").main(["--tiny", "--rounds", "2", "--out", str(path)])
    record = json.loads(path.read_text())
    assert record["comparisons"] == 4
    costs = record["costs"]
    assert costs["with a closure"] == pytest.approx(
        costs["step"] + costs["sample"] / 16 + costs["comparison"] / 50
    )
