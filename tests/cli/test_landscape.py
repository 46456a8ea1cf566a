"""`equilibrate landscape` with built-in tasks and with a task of the user."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from equilibrate.cli.app import app
from equilibrate.cli.tasks import load_task

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


def test_task_of_the_user_is_measured(run, tmp_path):
    (tmp_path / "own_regression_task.py").write_text(TASK_MODULE)
    arguments = [
        "--task", "own_regression_task:task", "--lrs", "0.1,0.05", "--seeds", "3",
        "--batch-size", "4", "--out", "found", "--weight-decay", "0", "--threshold", "0.1",
    ]  # fmt: skip
    result = run(*arguments)
    assert result.exception is None, result.output
    assert "Tr(HC̃) = " in result.output
    assert (tmp_path / "found/landscape.png").stat().st_size > 10_000
    assert "Slope of G" in (tmp_path / "found/landscape.txt").read_text()
    first, *rows = map(json.loads, (tmp_path / "found/landscape.jsonl").read_text().splitlines())
    assert first["config"]["lrs"] == [0.1, 0.05]
    assert first["config"]["threshold"] == 0.1
    assert [row["lr"] for row in rows] == [0.1, 0.05]
    assert "already exists: use --overwrite, or another folder" in str(run(*arguments).exception)
    assert run(*arguments, "--overwrite").exception is None


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
    assert result.exception is None, result.output
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
    ],
)
def test_invalid_arguments_raise(run, arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert not Path("runs/landscape/landscape.jsonl").exists()
