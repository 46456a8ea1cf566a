"""Every process takes part in the readings of a recorder, and rank 0 alone writes."""

from support import recorded

from equilibrate.runlog import records


def test_a_sharded_run_is_recorded_once(processes, tmp_path):
    results = processes.run(recorded.sharded, str(tmp_path), size=2)
    assert results[0] == results[1]
    rows = records.read(tmp_path / "train.jsonl").rows
    assert [row["step"] for row in rows] == [4, 8, 12, 16]
    assert all(set(row["layers"]) == {"weight", "bias"} for row in rows)
    assert all(row["loss"] > 0 for row in rows)
    assert any(row["lowered"] for row in rows)
