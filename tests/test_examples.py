"""The examples run, smaller than by default. Those with trainers are in tests/trainers."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Return a function that runs an example in an empty folder and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_a_bare_loop_that_is_resumed_prints_what_an_uninterrupted_one_prints(example):
    straight = example("bare_loop.py", "--epochs", "8")
    assert "lr 0.025  since step 896: equilibrated" in straight
    stopped = example("bare_loop.py", "--epochs", "5")
    resumed = example("bare_loop.py", "--epochs", "8", "--resume")
    epochs = [line for line in stopped.splitlines() if line.startswith("epoch")]
    assert epochs + resumed.splitlines() == straight.splitlines()


def test_a_landscape(example):
    printed = example("landscape.py", "--threshold", "1")
    assert printed.startswith("loss 0.5")
    assert printed.count("⟨(∇f)²⟩") == 3
    assert "Curvature along the noise" in printed


def test_a_forecast(example):
    lines = example("forecast.py", "--steps", "900", "--repeats", "2").splitlines()
    forecasts, ends = lines[::2], [float(line.split()[4]) for line in lines[1::2]]
    assert [line.split(" would")[0] for line in forecasts] == [
        "lr 0.005: a cooldown over 180 steps", "lr 0.1: a cooldown over 180 steps",
    ]  # fmt: skip
    slow, fast = (float(line.split("end at ")[1].split()[0]) for line in forecasts)
    assert fast < slow - 0.03
    assert ends[1] < ends[0] - 0.03


def test_a_cooldown(example):
    lines = example("cooldown.py", "--steps", "1500").splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == [
        "constant", "cosine", "cooldown",
    ]  # fmt: skip
    losses = {line.split()[0]: float(line.split()[-1]) for line in lines if "began" not in line}
    assert losses["cooldown:"] < losses["constant:"]
    assert losses["with"] < losses["constant:"]
    assert "decays linearly until step 1500" in lines[-1]


def test_every_example_is_listed():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"[{path.name}]({path.name})" in text
