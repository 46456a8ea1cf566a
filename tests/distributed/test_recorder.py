"""Every process takes part in the readings of a recorder, and rank 0 alone writes."""

from support import recorded

from equilibrate.record import jsonl


def test_a_sharded_run_is_recorded_once(processes, tmp_path):
    results = processes.run(recorded.sharded, str(tmp_path), size=2)
    assert results[0] == results[1]
    rows = jsonl.read(tmp_path / "train.jsonl").rows
    assert [row["step"] for row in rows] == [4, 8, 12, 16]
    layers = [set(row["layers"]) for row in rows if "layers" in row]  # not right after a lowering
    assert layers
    assert all(names == {"weight", "bias"} for names in layers)
    assert all(row["loss"] > 0 for row in rows)
    assert any(made["lowered"] for row in rows for made in row.get("decisions", ()))
