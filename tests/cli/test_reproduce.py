"""`equilibrate reproduce`: what it prints, and how it continues after a kill."""

import shutil
import signal
import subprocess
import sys
import time

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from equilibrate.cli.app import app
from equilibrate.paper.runs.reproduce import reproduce
from equilibrate.runlog.records import read

SHORT = ["--epochs-scale", "0.01", "--seeds", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    reproduce(["1a", "B1a"], out=out, epochs_scale=0.01, seeds=2)
    return out


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy")


def test_output_shows_progress_claims_and_paths(copy):
    arguments = ["reproduce", "1a", "--out", str(copy), *SHORT]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "mlp-initial" in result.output
    assert "done" in result.output
    assert "Claims of the paper" in result.output
    assert "not tested at this scale: 1 " in result.output  # the only claim about figure 1a
    assert "Claims beyond the paper" not in result.output
    assert f"report.html  {copy / 'report.html'}" in result.output


@pytest.mark.parametrize("width", [80, 120])
def test_claims_fit_the_terminal(copy, width):
    arguments = ["reproduce", "--draw-only", "--out", str(copy)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    table = [line for line in result.output.splitlines() if line.startswith(" ")]
    assert max(map(cell_len, table)) == width
    assert "…" not in result.output
    assert result.output.index("Claims of the paper") < result.output.index("Claims beyond")
    assert "B1a" in result.output
    assert "B2a" not in result.output  # it is not drawn


def test_killed_command_continues_when_it_is_run_again(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "equilibrate", "reproduce", "1a"]
    command += ["--epochs-scale", "0.5", "--seeds", "2", "--device", "cpu", "--out"]
    process = subprocess.Popen([*command, str(tmp_path / "killed")], stdout=subprocess.DEVNULL)
    record = tmp_path / "killed" / "records" / "mlp-initial.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if record.exists() and record.read_bytes().count(b"\n") > 30:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = read(record).rows
    assert killed[-1]["epoch"] < 40
    subprocess.run([*command, str(tmp_path / "killed")], check=True, stdout=subprocess.DEVNULL)
    reproduce(["1a"], out=tmp_path / "uninterrupted", epochs_scale=0.5, seeds=2)
    expected = read(tmp_path / "uninterrupted" / "records" / "mlp-initial.jsonl").rows
    assert read(record).rows == expected
    assert expected[-1]["epoch"] == 40
