"""Records as arrays: phases of constant learning rate, and runs that were made in parts."""

from dataclasses import replace

import numpy as np
import pytest
from paper_support.synthetic import write

from equilibrate.runlog import records
from equilibrate_paper.analysis import results
from equilibrate_paper.protocol.profiles import PROFILES

PAPER = PROFILES["paper"].runs


def value(time, lr, arm, seed):
    """Different for every learning rate, arm and seed."""
    return 1e4 * lr + seed + len(arm) / 100


def load(folder):
    return results.load(folder / "records")


def test_each_constant_arm_is_a_phase(tmp_path):
    run = PAPER["mlp-unbiased"]
    write(run, tmp_path, {"landscape": value})
    phases = load(tmp_path)["mlp-unbiased"].phases()
    assert [(phase.arm, phase.lr) for phase in phases] == [
        (f"η={lr:g}", lr) for lr in (0.05, 0.02, 0.01, 0.005, 0.003)
    ]
    for phase in phases:
        assert phase.finished
        assert phase.last("landscape").tolist() == [
            value(0, phase.lr, phase.arm, seed) for seed in run.seeds
        ]


def test_adaptive_arms_have_no_phases(tmp_path):
    write(PAPER["mlp-schedules"], tmp_path, {"left": value})
    phases = load(tmp_path)["mlp-schedules"].phases()
    assert [(phase.arm, phase.start) for phase in phases] == [
        ("preset", start) for start in (0, 100, 200, 300)
    ]


@pytest.mark.parametrize("name", ["mlp-sequence", "mlp-schedules"])
def test_joined_parts_equal_the_complete_run(tmp_path, name):
    run = PAPER[name]
    write(run, tmp_path / "whole", {"left": value})
    for first, last in ((run.seeds[2], run.seeds[3]), (run.seeds[0], run.seeds[1])):
        write(run.part(first, last), tmp_path / "parts", {"left": value})
    whole, joined = load(tmp_path / "whole")[name], load(tmp_path / "parts")[name]
    assert list(load(tmp_path / "parts")) == [name]
    assert joined.run == whole.run
    assert joined.rows == whole.rows
    assert joined.complete


def test_shorter_parts_are_left_out(tmp_path):
    run = PAPER["mlp-sequence"]
    write(run.part(100, 101), tmp_path, {"left": value})
    write(run.part(102, 103), tmp_path, {"left": value}, upto=700)
    result = load(tmp_path)["mlp-sequence"]
    assert (result.run.seeds, result.shortfall) == ((100, 101), "2 of 4 seeds")
    assert np.isfinite(result.column("left")).all()
    write(run.part(102, 103), tmp_path, {"left": value})
    assert load(tmp_path)["mlp-sequence"].shortfall is None


def test_the_complete_run_replaces_its_parts(tmp_path):
    run = PAPER["mlp-sequence"]
    write(run.part(100, 101), tmp_path, {"left": lambda *_: 0.0})
    write(run, tmp_path, {"left": value}, upto=700)
    assert load(tmp_path)["mlp-sequence"].run.seeds == (100, 101)
    write(run, tmp_path, {"left": value})
    result = load(tmp_path)["mlp-sequence"]
    assert result.complete
    assert (result.column("left") > 0).all()


def test_parts_that_do_not_match_raise(tmp_path):
    run = PAPER["mlp-sequence"]
    write(run.part(100, 101), tmp_path, {"left": value})
    write(replace(run.part(102, 103), precision="tf32"), tmp_path, {"left": value})
    with pytest.raises(records.RecordError, match=r"parts of mlp-sequence \(mlp-sequence.100-101,"):
        load(tmp_path)
    write(run.part(101, 103), tmp_path, {"left": value})
    (tmp_path / "records" / "mlp-sequence.102-103.jsonl").unlink()
    with pytest.raises(records.RecordError, match="must differ in their seeds and in nothing else"):
        load(tmp_path)
