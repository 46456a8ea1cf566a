"""A reproduction that stops at its time limit continues to the same results."""

import itertools
import math
import time
from dataclasses import replace

import pytest
from paper_support.runs import INITIAL, SEQUENCE
from typer.testing import CliRunner

from equilibrate.record import jsonl
from equilibrate_paper.cli import app
from equilibrate_paper.data import datasets
from equilibrate_paper.protocol import profiles
from equilibrate_paper.protocol.schedules import PiecewiseConstant
from equilibrate_paper.runs import execute as execution
from equilibrate_paper.runs.errors import Unfinished
from equilibrate_paper.runs.folder import record_path
from equilibrate_paper.runs.reproduce import reproduce

SHORT = profiles.profile("quick", 0.02, 2)  # 2 epochs of the initial run, 11 of the sequence


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    reproduce(["2a"], out=out, profile=SHORT)
    return out


def rows(folder, name):
    return record_path(folder, name).read_bytes().splitlines()[1:]


def test_a_run_stops_after_the_epoch_that_reaches_the_limit(tmp_path, digits):
    """Each call executes one epoch, and together they write the file of one call."""
    for run in (INITIAL, SEQUENCE):
        execution.execute(run, tmp_path / "once", digits, profile="test")
        complete = [
            execution.execute(
                run, tmp_path / "often", digits, profile="test", stop_at=time.monotonic()
            )
            for _ in range(run.epochs)
        ]
        assert complete == [False] * (run.epochs - 1) + [True]
        assert rows(tmp_path / "often", run.name) == rows(tmp_path / "once", run.name)


def test_a_run_stops_before_an_epoch_that_would_end_too_late(tmp_path, digits, monkeypatch):
    """Epochs of ten seconds and a limit of 35 s: the fourth would end after 40 s."""
    clock = itertools.count(100.0, 10.0)
    monkeypatch.setattr(execution.time, "monotonic", lambda: next(clock))
    epochs = []
    run = replace(INITIAL, arms={"initial": PiecewiseConstant(((0.1, 9),))}, full_epochs=9)
    assert not execution.execute(
        run, tmp_path, digits, profile="test", stop_at=135.0, progress=epochs.append
    )
    assert epochs == [0, 1, 2, 3]


def test_calls_with_a_limit_come_to_the_same_results(uninterrupted, tmp_path):
    """Even a limit that has passed before the first epoch: every call executes one."""
    for _ in range(12):  # one epoch in each call
        with pytest.raises(Unfinished, match="Stopped at the time limit; what was done is saved"):
            reproduce(["2a"], out=tmp_path, max_minutes=1e-9, profile=SHORT)
        assert not (tmp_path / "claims.json").exists()
    reproduce(["2a"], out=tmp_path, max_minutes=1e-9, profile=SHORT)
    for name in ("mlp-initial", "mlp-sequence"):
        assert rows(tmp_path, name) == rows(uninterrupted, name)
    assert (tmp_path / "claims.json").read_bytes() == (uninterrupted / "claims.json").read_bytes()


def test_runs_that_start_from_an_unfinished_run_are_not_begun(tmp_path):
    with pytest.raises(Unfinished):
        reproduce(["2a"], out=tmp_path, max_minutes=1e-9, profile=SHORT)
    assert [path.stem for path in (tmp_path / "records").iterdir()] == ["mlp-initial"]


def test_the_command_exits_with_its_own_code(tmp_path):
    command = ["reproduce", "1a", "--epochs-scale", "0.02", "--device", "cpu"]
    command += ["--out", str(tmp_path)]
    runner, wide = CliRunner(), {"COLUMNS": "200"}
    stopped = runner.invoke(app, [*command, "--max-minutes", "1e-9"], env=wide)
    assert stopped.exit_code == 3
    assert "Stopped at the time limit" in stopped.output
    assert "Run the same command again to continue." in stopped.output
    done = runner.invoke(app, command, env=wide)
    assert done.exit_code == 0
    assert jsonl.read(record_path(tmp_path, "mlp-initial")).rows[-1]["epoch"] == 2


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_that_is_no_time_is_refused(tmp_path, limit):
    with pytest.raises(ValueError, match=r"max_minutes must be positive and finite, got"):
        reproduce(["1a"], out=tmp_path, max_minutes=limit, profile=SHORT)
