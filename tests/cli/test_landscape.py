"""`equilibrate landscape` with built-in tasks and with a task of the user."""

import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from equilibrate.cli import landscape
from equilibrate.cli.app import app
from equilibrate.cli.tasks import load_task
from equilibrate.landscape import SweepRun
from equilibrate.runlog import checkpoints, records
from equilibrate.runlog.checkpoints import CheckpointError
from equilibrate.runlog.files import WriteError

TASK_MODULE = """
import torch
from torch import nn

def task():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 3, generator=generator), torch.randn(40, 1, generator=generator)
    def build(seed):
        model = nn.Linear(3, 1)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        return model
    return build, lambda out, y: (out - y).square().mean() / 2, data
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["landscape", *arguments])


ARGUMENTS = [
    "--task", "own_regression_task:task", "--lrs", "0.1,0.05", "--seeds", "3",
    "--batch-size", "4", "--out", "found", "--weight-decay", "0", "--threshold", "0.1",
]  # fmt: skip


def rows(folder):
    return (folder / "landscape.jsonl").read_text().splitlines()[1:]


@pytest.fixture
def own_task(tmp_path):
    (tmp_path / "own_regression_task.py").write_text(TASK_MODULE)


def test_task_of_the_user_is_measured(run, tmp_path, own_task):
    arguments = ARGUMENTS
    result = run(*arguments)
    assert result.exception is None, result.output
    assert "Tr(HC̃) = " in result.output
    assert (tmp_path / "found/landscape.png").stat().st_size > 10_000
    assert "Slope of G" in (tmp_path / "found/landscape.txt").read_text()
    first, *rows = map(json.loads, (tmp_path / "found/landscape.jsonl").read_text().splitlines())
    assert first["config"]["lrs"] == [0.1, 0.05]
    assert first["config"]["threshold"] == 0.1
    assert [row["lr"] for row in rows] == [0.1, 0.05]
    assert "already exists: use --resume, --overwrite, or" in str(run(*arguments).exception)
    drawn = [
        (tmp_path / "found" / name).read_bytes() for name in ("landscape.txt", "landscape.png")
    ]
    for name in ("landscape.txt", "landscape.png"):
        (tmp_path / "found" / name).unlink()
    again = run("--out", "found", "--draw-only")
    assert again.exception is None, again.output
    assert drawn == [
        (tmp_path / "found" / name).read_bytes() for name in ("landscape.txt", "landscape.png")
    ]
    finished = run(*arguments, "--resume")
    assert finished.exception is None
    assert "Tr(HC̃) = " in finished.output
    assert run(*arguments, "--overwrite").exception is None


class Killed(BaseException):
    pass


def kill_at(call, function):
    """The function, which is killed when it is called for the given time."""
    calls = itertools.count(1)

    def wrapped(*args):
        if next(calls) == call:
            raise Killed
        return function(*args)

    return wrapped


@pytest.mark.parametrize(
    ("seconds", "killed", "left"),
    [
        (0.0, (SweepRun, "run_epoch", 30), 7),  # there is a checkpoint after each epoch
        (99.0, (SweepRun, "run_epoch", 30), 12),  # and here after each rate
        # The second rate is in the record, but not in the checkpoint.
        (0.0, (checkpoints, "save", 24), 13),
        (99.0, (checkpoints, "save", 2), 24),
    ],
)
def test_killed_sweep_is_resumed_to_the_same_rows(
    run, tmp_path, own_task, monkeypatch, seconds, killed, left
):
    """Two rates of three, twelve epochs each, are recorded when the run is killed."""
    monkeypatch.setattr(landscape, "_SECONDS_BETWEEN_CHECKPOINTS", seconds)
    arguments = [*ARGUMENTS, "--lrs", "0.1,0.05,0.02", "--epochs", "12", "--threshold", "9"]
    assert run(*arguments, "--out", "whole").exception is None
    place, name, call = killed
    with monkeypatch.context() as patch:
        patch.setattr(place, name, kill_at(call, getattr(place, name)))
        with pytest.raises(Killed):
            run(*arguments)
    assert len(rows(tmp_path / "found")) == 2
    epochs, run_epoch = [], SweepRun.run_epoch
    monkeypatch.setattr(
        SweepRun, "run_epoch", lambda self, bar: epochs.append(1) or run_epoch(self, bar)
    )
    again = run(*arguments, "--resume")
    assert again.exception is None, again.output
    assert rows(tmp_path / "found") == rows(tmp_path / "whole")
    assert len(epochs) == left


def test_resume_with_other_settings_is_refused(run, tmp_path, own_task):
    arguments = [*ARGUMENTS, "--epochs", "2"]
    run(*arguments)
    other = run(*arguments, "--resume", "--momentum", "0.5")
    assert "was written with other settings (momentum: 0.0 in the file, 0.5" in str(other.exception)


def test_resume_with_other_data_is_refused(run, tmp_path, own_task, monkeypatch):
    arguments = [*ARGUMENTS, "--epochs", "2"]
    run(*arguments)
    monkeypatch.delitem(sys.modules, "own_regression_task")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    changed = TASK_MODULE.replace("manual_seed(0)", "manual_seed(1234567)")
    (tmp_path / "own_regression_task.py").write_text(changed)
    assert "other settings (data: '" in str(run(*arguments, "--resume").exception)


def test_far_from_equilibrium_there_is_no_conclusion(run, tmp_path, own_task):
    result = run(*ARGUMENTS, "--lrs", "1e-6,2e-6,3e-6", "--epochs", "4")
    assert result.exit_code == 1
    text = (tmp_path / "found/landscape.txt").read_text()
    assert text.startswith("No conclusion: FDR1 held at 0 of 3 learning rates")
    assert "harmonic" not in result.output
    assert (tmp_path / "found/landscape.png").stat().st_size > 10_000
    assert len(rows(tmp_path / "found")) == 3
    assert run("--out", "found", "--draw-only").exit_code == 1


def test_full_disk_is_reported_and_the_run_can_be_resumed(run, tmp_path, own_task, full_disk):
    arguments = [*ARGUMENTS, "--epochs", "12", "--threshold", "9"]
    with full_disk(3_000):
        result = run(*arguments)
    assert isinstance(result.exception, CheckpointError)
    assert "cannot write to found/landscape.pt" in str(result.exception)
    names = {path.name for path in (tmp_path / "found").iterdir()}
    assert names == {".lock", "landscape.jsonl"}
    with full_disk(30_000):  # enough for everything but the figure
        result = run(*arguments, "--resume")
    assert isinstance(result.exception, WriteError)
    assert "cannot write to found/landscape.png" in str(result.exception)
    assert run("--out", "found", "--draw-only").exit_code == 0


def test_only_records_of_a_sweep_are_drawn(run, tmp_path):
    assert "does not exist: run the" in str(run("--out", "none", "--draw-only").exception)
    with records.Writer(tmp_path / "found/landscape.jsonl", config={"task": "x"}) as writer:
        writer.write({"epoch": 1})
    message = "is not a record of this version of equilibrate landscape"
    assert message in str(run("--out", "found", "--draw-only").exception)
    config = {
        "task": "x", "momentum": 0.0, "sampling": "shuffled", "steps_per_epoch": 3,
        "threshold": 0.1,
    }  # fmt: skip
    records.Writer(tmp_path / "empty/landscape.jsonl", config=config).close()
    result = run("--out", "empty", "--draw-only")
    assert "has no learning rate yet: continue with --resume" in str(result.exception)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ("nn.Linear, (1, 2)", "(type, (int, int))"),
        ("nn.Linear(1, 1), nn.MSELoss(), (1, 2)", "(Linear, MSELoss, (int, int))"),
        ("None", "NoneType"),
    ],
)
def test_task_that_returns_something_else_raises(tmp_path, monkeypatch, returned, got):
    monkeypatch.chdir(tmp_path)
    name = f"own_wrong_task_{abs(hash(returned))}"
    (tmp_path / f"{name}.py").write_text(f"from torch import nn\ndef task(): return {returned}\n")
    with pytest.raises(ValueError, match=rf"must return \(a function .*, got {re.escape(got)}$"):
        load_task(f"{name}:task")


def test_digits_with_a_fixed_number_of_epochs(run, tmp_path):
    result = run("--epochs", "2", "--lrs", "0.1,0.2", "--seeds", "2", "--sampling", "shuffled")
    assert result.exit_code == 1, result.output
    assert "No conclusion: FDR1 held at 0 of 2 learning rates" in result.output
    assert (tmp_path / "runs/landscape/landscape.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lrs", "0.1;0.2"], "lrs must be numbers such as 0.1,0.05,0.02, got '0.1;0.2'"),
        (["--sampling", "random"], "sampling must be one of shuffled, independent, got 'random'"),
        (["--task", "nothing"], "or MODULE:FUNCTION, got 'nothing'"),
        (["--task", "no_such_module:task"], "cannot be imported"),
        (["--task", "math:pi"], "'math:pi' must return (a function from seed to model, the loss"),
        (["--device", "warp"], "device='warp' is unknown: use auto, cpu or cuda"),
        (["--lrs", "0.1,-0.2"], "lrs must be positive and finite, got [0.1, -0.2]"),
        (["--weight-decay", "nan"], "weight_decay must be at least 0 and finite, got nan"),
        (["--resume", "--overwrite"], "--resume and --overwrite cannot be combined"),
    ],
)
def test_invalid_arguments_raise(run, arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert not Path("runs/landscape/landscape.jsonl").exists()
