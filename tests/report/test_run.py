"""What a report shows of a run is taken from its rows, whichever they have."""

import pytest

from equilibrate.report import run
from equilibrate.report.run import from_records
from equilibrate.runlog.records import RecordError, Records, Writer


def row(k, **more):
    return {
        "step": 100 * k,
        "time": 1000.0 + 3 * k,
        "loss": 1 / k,
        "left": 1.0,
        "right": 1.0,
        "residual": 0.5 / k,
        "lrs": [0.1, 0.2],
        "lowered": False,
        "reason": f"not yet: {k}",
        **more,
    }


def made(rows, config=None, **options):
    return from_records(Records(config or {}, {}, rows), "mine", **options)


def test_columns():
    found = made([row(1, epoch=1), row(2, epoch=2, stderr=0.1, count=50), row(3, epoch=3)])
    assert found.x == {"step": [100, 200, 300], "epoch": [1, 2, 3], "time": [0, 3, 6]}
    assert found.loss == [1, 0.5, 0.333333]
    assert found.residual == [0.5, 0.25, 0.166667]
    assert found.margin == [None, pytest.approx(0.196, abs=1e-4), None]
    assert found.count == [None, 50, None]
    assert found.lrs == [[0.1] * 3, [0.2] * 3]
    assert found.lrs_from_now_on
    assert (found.recorded, found.others, found.gains, found.layers) == (3, {}, [], None)


def test_a_record_without_most_columns():
    found = made([{"accuracy": 0.5}, {"accuracy": 0.7, "note": "text"}])
    assert found.x == {"step": [1, 2]}
    assert found.loss == found.residual == [None, None]
    assert found.lrs == [[None, None]]
    assert found.decisions == []
    assert found.others == {"accuracy": [0.5, 0.7]}


def test_a_residual_that_was_not_recorded_is_computed():
    rows = [{"left": 3.0, "right": 2.0}, {"left": 1.0, "right": 0.0}, {"left": None, "right": 1.0}]
    assert made(rows).residual == [0.5, None, None]


def test_rates_of_a_record_of_the_train_command():
    found = made([{"step": 1, "lr": 0.1}, {"step": 2, "lr": 0.05}], {"threshold": 0.02})
    assert found.lrs == [[0.1, 0.05]]
    assert not found.lrs_from_now_on
    assert found.threshold == 0.02


def test_rates_after_a_decision_and_another_name_of_the_loss():
    found = made([{"step": 1, "lr": 0.1, "next_lr": 0.05, "train_loss": 3.0}])
    assert (found.lrs, found.lrs_from_now_on) == ([[0.05]], True)
    assert (found.loss, found.others) == ([3.0], {})


def test_all_judgements_of_a_row_are_decisions():
    judgements = [
        {"step": 120, "lowered": True, "reason": "equilibrated", "lrs": [0.05]},
        {"step": 180, "lowered": False, "reason": "not yet", "lrs": [0.05]},
    ]
    found = made([row(1), row(2, lowered=True, judgements=judgements)])
    assert [(d.row, d.step, d.lowered, d.reason) for d in found.decisions] == [
        (0, 100, False, "not yet: 1"),
        (1, 120, True, "equilibrated"),
        (1, 180, False, "not yet"),
    ]


def test_threshold():
    rule = {"recorder": {"rule": {"name": "Threshold", "threshold": 0.03}}}
    assert made([row(1)], rule).threshold == 0.03
    assert made([row(1)], {"recorder": {"rule": {"name": "Mine"}}}).threshold is None
    assert made([row(1)], {"recorder": "mine"}).threshold is None


def test_forecasts():
    forecasts = [{"horizon": 400, "gain": 0.2, "margin": 0.01}, {"horizon": 150, "gain": None}]
    found = made([row(1), row(2, forecasts=forecasts)])
    assert [(g.horizon, g.gain, g.margin) for g in found.gains] == [
        (150, [None, None], [None, None]),
        (400, [None, 0.2], [None, 0.01]),
    ]


def test_layers():
    one = {"a": {"left": 1.0, "right": 1.0, "residual": 0.0, "stderr": 0.5, "state": "falls"}}
    two = {
        "a": {"left": 3.0, "right": 2.0, "scale_invariant": True, "state": "grows"},
        "b": {"residual": None, "state": "falls"},
    }
    found = made([row(1), row(2, layers=one), row(3, layers=two)]).layers
    assert found is not None
    assert (found.names, found.rows) == (["a", "b"], [1, 2])
    assert found.residual == [[0.0, 0.5], [None, None]]
    assert found.margin == [[0.979982, None], [None, None]]
    assert found.states == ["falls", "grows"]
    assert found.state == [[0, 1], [None, 0]]
    assert found.scale_invariant == [True, False]
    assert found.last == two


def test_long_records_are_thinned_and_keep_each_lowering():
    layers = {"layers": {"a": {"residual": 1.0}}}
    rows = [
        row(k, lowered=k in (777, 3333), **(layers if k % 7 == 0 else {})) for k in range(1, 9002)
    ]
    found = made(rows)
    assert found.recorded == 9001
    assert len(found.loss) <= run.MOST_ROWS + run.MOST_COLUMNS + 3
    steps = found.x["step"]
    assert (steps[0], steps[-1]) == (100, 900100)
    lowered = [d for d in found.decisions if d.lowered]
    assert [steps[d.row] for d in lowered] == [77700, 333300]
    assert sum(d.row >= 0 for d in found.decisions) == len(found.loss)
    assert len(found.decisions) == 9001
    assert found.layers is not None
    assert run.MOST_COLUMNS / 2 < len(found.layers.rows) <= run.MOST_COLUMNS + 1
    assert [steps[i] % 700 for i in found.layers.rows] == [0] * len(found.layers.rows)
    assert found.layers.residual == [[1.0] * len(found.layers.rows)]


def test_one_replica_of_an_ensemble():
    rows = [{"epoch": k, "step": 6 * k, "left": [1, 2], "right": [2, 2]} for k in (1, 2)]
    assert made(rows, replica=1).residual == [0, 0]
    assert made(rows, replica=0).residual == [-0.5, -0.5]
    for replica in (None, 2, -1):
        with pytest.raises(RecordError, match=r"has 2 replicas: choose one of them .* 0 to 1"):
            made(rows, replica=replica)
    with pytest.raises(RecordError, match="that of a single model: leave out --replica"):
        made([row(1)], replica=0)


def test_a_run_is_named_after_its_folder(tmp_path):
    for path in (tmp_path / "mine" / "train.jsonl", tmp_path / "other.jsonl"):
        with Writer(path, config={}) as writer:
            writer.write({"step": 1})
    assert run.load(tmp_path / "mine" / "train.jsonl").title == "mine"
    assert run.load(tmp_path / "other.jsonl").title == "other"
    assert run.load(tmp_path / "other.jsonl", title="Best").title == "Best"


def test_a_record_without_rows():
    with pytest.raises(RecordError, match="has no rows yet: wait for the first one"):
        made([])
