"""`equilibrate-paper train` in its own process and in this one."""

import os
import subprocess
import sys
import time

import pytest
from support import forks
from typer.testing import CliRunner

from equilibrate.record import jsonl
from equilibrate.record.jsonl import RecordError
from equilibrate_paper.cli import app, run
from equilibrate_paper.runs import training
from equilibrate_paper.runs.errors import Diverged

SHORT = ["--task", "digits-mlp", "--epochs", "6", "--batch-size", "50"]
COMMAND = [sys.executable, "-W", "error", "-m", "equilibrate_paper", "train"]


def rows(folder):
    """The rows without the time of day."""
    found = jsonl.read(folder / "train.jsonl").rows
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def test_train_writes_a_record_and_a_report(tmp_path, monkeypatch):
    command, env = [*COMMAND, *SHORT], {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "report  runs/digits-mlp/report.html" in done.stdout
    assert (tmp_path / "runs/digits-mlp/report.html").stat().st_size > 10_000
    assert [row["epoch"] for row in rows(tmp_path / "runs/digits-mlp")] == [1, 2, 3, 4, 5, 6]
    monkeypatch.chdir(tmp_path)
    again = CliRunner().invoke(app, ["train", *SHORT])
    assert "already exists: resume it (mode='resume', or --resume" in str(again.exception)


def test_killed_run_resumes_to_the_same_rows(tmp_path):
    """The killed run is a process of its own; the others give the same numbers in this one."""
    long = ["--task", "digits-mlp", "--epochs", "40", "--batch-size", "100"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    arguments = ["train", *long, "--out", str(killed)]
    process = forks.start(forks.command_line, arguments, tmp_path / "output.txt")
    record = killed / "train.jsonl"
    while not (record.exists() and record.read_bytes().count(b"\n") > 4):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert 3 < len(rows(killed)) < 40
    for arguments in (["--out", str(killed), "--resume"], ["--out", str(whole)]):
        result = CliRunner().invoke(app, ["train", *long, *arguments])
        assert result.exit_code == 0, result.output
    assert rows(killed) == rows(whole)


def test_factor_multiplies_the_learning_rate(tmp_path):
    options = ["--epochs", "3", "--batch-size", "10", "--lr", "0.2", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["train", *options, "--threshold", "1e9", "--factor", "0.25"])
    assert result.exit_code == 0, result.output
    rates = [row["lrs"][0] for row in rows(tmp_path)]
    assert rates == sorted(rates, reverse=True)
    lowered = {0.05: 1, 0.0125: 2, 0.003125: 3}[rates[-1]]
    assert f"learning rate lowered {lowered} times, to {rates[-1]:.3g}, test" in result.output


def train(*arguments):
    short = ["train", "--epochs", "2", "--batch-size", "500", "--threshold", "1e-9"]
    return CliRunner().invoke(app, [*short, *arguments])


def test_learning_rate_that_is_never_lowered(tmp_path):
    result = train("--out", str(tmp_path))
    assert "2 epochs, learning rate not lowered: 0.2, test accuracy" in result.output


def test_finished_run_continues_with_more_epochs(tmp_path):
    long, short = str(tmp_path / "long"), str(tmp_path / "short")
    assert train("--out", long, "--epochs", "3").exit_code == 0
    assert train("--out", short).exit_code == 0
    more = train("--out", short, "--resume", "--epochs", "3")
    assert more.exit_code == 0, more.output
    assert "3 epochs" in more.output
    assert rows(tmp_path / "short") == rows(tmp_path / "long")


def test_divergence_ends_the_run_with_an_error(tmp_path):
    result = train("--out", str(tmp_path), "--lr", "1e9", "--epochs", "50")
    assert isinstance(result.exception, Diverged)
    assert "SGD diverged in epoch 1: the loss is nan. The epochs so far are in" in str(
        result.exception
    )
    assert [row["loss"] for row in rows(tmp_path)] == [None]


def test_full_disk_is_reported_and_the_run_can_be_resumed(tmp_path, full_disk):
    with full_disk(5_000):
        result = train("--out", str(tmp_path))
    assert isinstance(result.exception, RecordError)
    assert "checkpoint.pt (File too large): free some space" in str(result.exception)
    assert train("--out", str(tmp_path), "--resume").exit_code == 0
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]


@pytest.mark.parametrize("mode", ["new", "overwrite"])
def test_new_run_does_not_use_an_old_checkpoint(tmp_path, mode, monkeypatch):
    train("--out", str(tmp_path))
    expected = rows(tmp_path)
    if mode == "new":
        (tmp_path / "train.jsonl").unlink()
    with monkeypatch.context() as patch:  # interrupted in its first epoch
        patch.setattr(training, "_run_epoch", interrupt)
        assert train("--out", str(tmp_path), *["--overwrite"] * (mode != "new")).exit_code == 130
    assert train("--out", str(tmp_path), "--resume").exit_code == 0
    assert rows(tmp_path) == expected


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "imagenet"], "task must be one of digits-mlp, digits-cnn, mlp, cnn"),
        (
            ["--task", "no[/red]such"],
            "task must be one of digits-mlp, digits-cnn, mlp, cnn, got 'no[/red]such'",
        ),
        (["--lr", "0"], "lr must be positive, got 0.0"),
        (["--lr", "inf"], "lr must be positive, got inf"),
        (["--weight-decay", "-1"], "Invalid weight_decay value: -1.0"),
        (["--data-dir", "missing"], "data_dir='missing' is not a folder: check its name"),
        (["--epochs", "0"], "epochs must be positive, got 0"),
        (["--seed", "9" * 20], f"seed must be below 2⁶³, got {'9' * 20}"),
        (["--batch-size", "9" * 20], f"batch_size must be below 2⁶³, got {'9' * 20}"),
        (["--threshold", "-1"], "threshold must be a positive number such as 0.01, got -1.0"),
        (["--factor", "1"], "factor must lie between 0 and 1, such as 0.9, got 1.0"),
        (["--resume", "--overwrite"], "--resume and --overwrite cannot be combined"),
        (["--out", "file/below"], "cannot write to "),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(
    tmp_path, monkeypatch, capsys, arguments, message
):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["equilibrate-paper", "train", *arguments])
    with pytest.raises(SystemExit) as exit:
        run()
    assert exit.value.code == 2
    assert f"equilibrate-paper: {message}" in capsys.readouterr().err.replace("\n", " ")
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("runs.training.train", ["train"], "Interrupted. Run again with --resume to continue."),
        (
            "runs.reproduce.execute",
            ["reproduce", "1a"],
            "Interrupted. Run the same command again to continue.",
        ),
        (
            "runs.reproduce.execute",
            ["reproduce", "1a", "--overwrite"],
            "Interrupted. Run the same command again without --overwrite to continue.",
        ),
    ],
)
def test_interrupted_command_says_how_to_continue(
    tmp_path, monkeypatch, function, arguments, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"equilibrate_paper.{function}", interrupt)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    assert message in result.output
