"""`equilibrate-paper reproduce`: what it prints, and how it continues after a kill."""

import shutil
import time

import pytest
import torch
from rich.cells import cell_len
from support import forks
from typer.testing import CliRunner

from equilibrate.record.jsonl import read
from equilibrate_paper.cli import app, parse_device
from equilibrate_paper.protocol.profiles import profile
from equilibrate_paper.runs.reproduce import reproduce

SHORT = ["--epochs-scale", "0.01", "--seeds", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    reproduce(["1a", "B1a"], out=out, profile=profile("quick", 0.01, 2))
    return out


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy")


def test_output_shows_progress_claims_and_paths(copy):
    arguments = ["reproduce", "1a", "--out", str(copy), *SHORT]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "mlp-initial" in result.output
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


@pytest.mark.slow
def test_killed_command_continues_when_it_is_run_again(tmp_path):
    """The killed command is a process of its own; the others give the same numbers in this one."""
    killed = tmp_path / "killed"
    arguments = ["reproduce", "1a", "--epochs-scale", "0.5", "--seeds", "2", "--device", "cpu"]
    arguments += ["--out", str(killed)]
    process = forks.start(forks.command_line, arguments, tmp_path / "output.txt")
    record = killed / "records" / "mlp-initial.jsonl"
    while not (record.exists() and record.read_bytes().count(b"\n") > 30):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert read(record).rows[-1]["epoch"] < 40
    assert CliRunner().invoke(app, arguments).exit_code == 0
    reproduce(["1a"], out=tmp_path / "uninterrupted", profile=profile("quick", 0.5, 2))
    expected = read(tmp_path / "uninterrupted" / "records" / "mlp-initial.jsonl").rows
    assert read(record).rows == expected
    assert expected[-1]["epoch"] == 40


def test_draw_only_and_overwrite_cannot_be_combined(copy):
    arguments = ["reproduce", "--draw-only", "--overwrite", "--out", str(copy)]
    assert "cannot be combined" in str(CliRunner().invoke(app, arguments).exception)


def test_auto_is_a_gpu_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("auto") == torch.device("cuda")
    assert parse_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("warp", "device='warp' is unknown: use auto, cpu or cuda"),
        ("mps", "device='mps' is not supported: use auto, cpu or cuda"),
        ("cuda:99", r"device='cuda:99' is not available: found \d+ CUDA devices; use cpu"),
    ],
)
def test_unavailable_device_raises(name, message):
    with pytest.raises(ValueError, match=message):
        parse_device(name)
