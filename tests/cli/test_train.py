"""`equilibrate train` in its own process and in this one."""

import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import equilibrate
from equilibrate import cli
from equilibrate.cli.app import app
from equilibrate.runlog import records

SHORT = ["--task", "digits-mlp", "--epochs", "6", "--batch-size", "50"]
COMMAND = [sys.executable, "-W", "error", "-m", "equilibrate", "train"]


def run(*arguments, cwd):
    command, env = [*COMMAND, *arguments], {**os.environ, "COLUMNS": "160"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=env)


def rows(folder):
    return records.read(folder / "train.jsonl").rows


def test_train_writes_a_record_and_a_figure(tmp_path):
    done = run(*SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "figure  runs/digits-mlp/train.png" in done.stdout
    assert (tmp_path / "runs/digits-mlp/train.png").stat().st_size > 10_000
    assert [row["epoch"] for row in rows(tmp_path / "runs/digits-mlp")] == [1, 2, 3, 4, 5, 6]
    assert all(row["reason"] for row in rows(tmp_path / "runs/digits-mlp"))
    again = run(*SHORT, cwd=tmp_path)
    assert again.returncode == 2
    assert "already exists: resume it, overwrite it" in again.stderr.replace("\n", " ")
    assert "Traceback" not in again.stderr


def test_killed_run_resumes_to_the_same_rows(tmp_path):
    long = ["--task", "digits-mlp", "--epochs", "40", "--batch-size", "50"]
    uninterrupted = run(*long, "--out", "uninterrupted", cwd=tmp_path)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    process = subprocess.Popen(
        [*COMMAND, *long, "--out", "killed"], cwd=tmp_path, stdout=subprocess.DEVNULL
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
    resumed = run(*long, "--out", "killed", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert rows(tmp_path / "killed") == rows(tmp_path / "uninterrupted")


def test_factor_multiplies_the_learning_rate(tmp_path):
    options = ["--epochs", "3", "--batch-size", "100", "--lr", "0.2", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["train", *options, "--threshold", "1e9", "--factor", "0.25"])
    assert result.exit_code == 0, result.output
    assert [row["lr"] for row in rows(tmp_path)] == [0.2, 0.05, 0.0125]  # of each epoch
    assert "learning rate lowered 3 times (0.0125 in the last)" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "imagenet"], "task must be one of digits-mlp, digits-cnn, mlp, cnn"),
        (["--lr", "0"], "lr must be positive, got 0.0"),
        (["--lr", "inf"], "lr must be positive, got inf"),
        (["--momentum", "1.5"], "momentum must lie in [0, 1), got 1.5"),
        (["--epochs", "0"], "epochs must be positive, got 0"),
        (["--threshold", "-1"], "threshold must be a positive number such as 0.01, got -1.0"),
        (["--factor", "1"], "factor must lie between 0 and 1, such as 0.9, got 1.0"),
        (["--resume", "--overwrite"], "--resume and --overwrite cannot be combined"),
        (["--out", "file/below"], "cannot write to file/below"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(
    tmp_path, monkeypatch, capsys, arguments, message
):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["equilibrate", "train", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    assert f"equilibrate: {message}" in capsys.readouterr().err.replace("\n", " ")
    assert not list(tmp_path.rglob("*.jsonl"))


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"equilibrate {equilibrate.__version__}\n")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("runs.training.train", ["train"], "Interrupted. Run again with --resume to continue."),
        (
            "runs.reproduce.run_missing",
            ["reproduce", "1a"],
            "Interrupted. Run the same command again to continue.",
        ),
        (
            "runs.reproduce.run_missing",
            ["reproduce", "1a", "--overwrite"],
            "Interrupted. Run the same command again without --overwrite to continue.",
        ),
    ],
)
def test_interrupted_command_says_how_to_continue(
    tmp_path, monkeypatch, function, arguments, message
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"equilibrate.paper.{function}", interrupt)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    assert message in result.output


@pytest.mark.parametrize("module", ["typer", "rich", "matplotlib"])
def test_missing_dependency_is_reported_with_the_install_command(module):
    """The module is hidden, as if only the core dependencies were installed."""
    code = f"import sys; sys.modules[{module!r}] = None\nfrom equilibrate.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        f"equilibrate: the command line needs {module}, which is not installed. Install it with: "
        "pip install 'equilibrate[experiments]'\n"
    )


def test_missing_module_of_the_package_itself_is_a_bug(monkeypatch):
    monkeypatch.setitem(sys.modules, "equilibrate.cli.app", None)
    with pytest.raises(ModuleNotFoundError, match=r"equilibrate\.cli\.app"):
        cli.main()
