"""`equilibrate train` as a person would run it."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import equilibrate
from equilibrate import cli
from equilibrate.report import figures as plots
from equilibrate.runlog import records

SHORT = ["--task", "digits-mlp", "--epochs", "6", "--batch-size", "50"]


def run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "equilibrate", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "160"},
    )


def rows(folder):
    return records.read(folder / "train.jsonl").rows


def test_train_says_where_its_figure_is(tmp_path):
    done = run("train", *SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "figure  runs/digits-mlp/train.png" in done.stdout
    assert (tmp_path / "runs/digits-mlp/train.png").stat().st_size > 10_000
    assert [row["epoch"] for row in rows(tmp_path / "runs/digits-mlp")] == [1, 2, 3, 4, 5, 6]
    assert all(row["reason"] for row in rows(tmp_path / "runs/digits-mlp"))
    again = run("train", *SHORT, cwd=tmp_path)
    assert again.returncode == 2
    assert "holds an earlier run: resume it, overwrite it" in again.stderr.replace("\n", " ")
    assert "Traceback" not in again.stderr


def test_a_killed_run_resumes_to_the_same_rows(tmp_path):
    long = ["--task", "digits-mlp", "--epochs", "40", "--batch-size", "50"]
    straight = run("train", *long, "--out", "straight", cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    process = subprocess.Popen(
        [sys.executable, "-m", "equilibrate", "train", *long, "--out", "killed"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    record = tmp_path / "killed" / "train.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if record.exists() and record.read_bytes().count(b"\n") > 4:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 3 < len(rows(tmp_path / "killed")) < 40
    resumed = run("train", *long, "--out", "killed", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert rows(tmp_path / "killed") == rows(tmp_path / "straight")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "imagenet"], "task must be one of digits-mlp, digits-cnn, mlp, cnn"),
        (["--lr", "0"], "lr must be positive, got 0.0"),
        (["--lr", "inf"], "lr must be positive, got inf"),
        (["--momentum", "1.5"], "momentum must lie in [0, 1), got 1.5"),
        (["--epochs", "0"], "epochs must be positive, got 0"),
        (["--tolerance", "-1"], "tolerance must be a positive number such as 0.01, got -1.0"),
        (["--decrease", "1"], "decrease must lie between 0 and 1, such as 0.1, got 1.0"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--out", "file/below"], "cannot write to file/below"),
    ],
)
def test_wrong_arguments_are_said_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["equilibrate", "train", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("paper.runs.training.train", ["train"], "stopped; --resume goes on where it was"),
        ("paper.runs.reproduce._run", ["reproduce", "1a"], "the same command goes on where it was"),
        (
            "paper.runs.reproduce._run",
            ["reproduce", "1a", "--overwrite"],
            "command without --overwrite goes",
        ),
    ],
)
def test_who_stops_a_run_is_told_how_it_goes_on(
    tmp_path, monkeypatch, function, arguments, message
):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"equilibrate.{function}", stop)
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 130
    assert message in result.output


def test_the_version_is_said_without_a_command():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"equilibrate {equilibrate.__version__}\n")


def test_every_group_has_its_learning_rate_drawn():
    row = {"epoch": 1, "loss": 1.0, "left": 1.0, "right": 1.0, "lowered": False}
    rows = [row | {"lr": [0.1, None]}, row | {"epoch": 2, "lr": [0.1, 0.01]}]
    *_, rate = plots.training(rows).axes
    first, second = (line.get_ydata() for line in rate.lines)
    assert list(first) == [0.1, 0.1]
    assert list(second) == pytest.approx([math.nan, 0.01], nan_ok=True)


def test_a_figure_of_undefined_rows_can_be_drawn(tmp_path):
    row = {"epoch": 1, "loss": None, "left": None, "right": None, "lr": 0.1, "lowered": False}
    figure = plots.training([row, {**row, "epoch": 2, "left": 1.0, "right": 1.0, "loss": 1.0}])
    path = plots.save(figure, tmp_path / "new" / "figure.svg")
    assert "half-running averages" in path.read_text()
    assert json.dumps(row)
