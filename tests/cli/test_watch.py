"""`equilibrate watch` shows a record that is absent, grows, is cut, and ends."""

import io
import os
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from equilibrate.cli import watch as watch_module
from equilibrate.cli.app import app
from equilibrate.report import live
from equilibrate.report.live import Follower
from equilibrate.runlog.records import RecordError, Writer


def row(k, **more):
    return {
        "step": 100 * k,
        "time": 1e9 + 2.0 * k,
        "epoch": k,
        "loss": 1 / k,
        "residual": 0.5 / k,
        "stderr": 0.01,
        "lrs": [0.1],
        "lowered": k % 4 == 0,
        "reason": f"reason {k}",
        **more,
    }


def shown(view, width=120):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(view)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def invoke(*arguments):
    return CliRunner().invoke(app, ["watch", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.mark.parametrize("width", [60, 120])
def test_once_shows_everything_that_was_recorded(tmp_path, width):
    state = {"state": "norm falls"}
    layers = {f"block.{n}.weight": {"residual": (-0.5) ** n, **state} for n in range(10)}
    forecasts = [{"horizon": 150, "gain": 0.25, "margin": 0.03}]
    with Writer(tmp_path / "train.jsonl", config={}) as writer:
        for k in range(1, 7):
            writer.write(row(k, layers=layers, forecasts=forecasts))
        writer.end()
    done = CliRunner().invoke(app, ["watch", "--once", str(tmp_path)], env={"COLUMNS": str(width)})
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    for part in (
        tmp_path.name,
        "step 600 · epoch 6 · 50 steps/s finished",
        "residual L/R − 1 0.083 ± 0.020",
        "loss 0.167",
        "learning rate 0.1",
        "cooldown of 150 steps gains 0.250 ± 0.030",
        "reason 6",
        "lowered 1 ×, last at step 400: reason 4",
        "layers by |L/R − 1|, 8 of 10",
        "block.0.weight 1",
        "norm falls" if width > 60 else "norm",
    ):
        assert part in text, part
    assert "block.9.weight" not in text
    assert max(map(len, done.output.splitlines())) <= width
    assert any("⡇" <= character <= "⣿" for character in done.output)


def test_a_run_of_the_train_command_and_one_without_decisions(tmp_path):
    with Writer(tmp_path / "train.jsonl", config={"threshold": 0.01}) as writer:
        writer.write({"step": 10, "lr": 0.1, "left": 1.0, "right": 2.0})
    text = invoke("--once", tmp_path).output
    assert "residual L/R − 1  −0.5" in text
    assert "last decision" not in text
    assert "last row 0 s ago" in text


def test_once_without_a_record_is_an_error(tmp_path):
    with pytest.raises(RecordError, match=r"train\.jsonl does not exist: record a run with"):
        CliRunner().invoke(app, ["watch", "--once", str(tmp_path)], catch_exceptions=False)


def test_a_run_is_followed_from_before_it_exists_to_its_end(tmp_path, monkeypatch):
    """What another process would do happens while the command sleeps."""
    path = tmp_path / "late.jsonl"
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    monkeypatch.setattr(watch_module, "Console", lambda: console)
    views, writer = [], None

    def events():
        nonlocal writer
        yield
        writer = Writer(path, config={})
        yield
        writer.write(row(1))
        yield
        with open(path, "ab") as file:
            file.write(b'{"step": 2')
        yield
        writer.close()
        writer = Writer(path, config={}, mode="overwrite")
        writer.write(row(7))
        yield
        writer.end("failed: no memory")
        yield

    step = events()

    def sleep(seconds):
        assert seconds == 0.5
        next(step)

    seen = live.Follower.view
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(Follower, "view", lambda self: views.append(seen(self)) or views[-1])
    done = CliRunner().invoke(app, ["watch", "--interval", "0.5", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert writer is not None
    writer.close()
    texts = [shown(view) for view in views]
    assert texts[0] == texts[1] == f"Waiting for {tmp_path / 'train.jsonl'} …\n"
    assert texts[2] == f"{path} has no rows yet …\n"
    assert "step 100" in texts[3]
    assert "step 100" in texts[4]  # the last line is not complete
    assert "step 700" in texts[5]
    assert "failed: no memory" in texts[6]
    assert len(texts) == 7


def test_ctrl_c_ends_it_quietly(tmp_path, monkeypatch):
    with Writer(tmp_path / "train.jsonl", config={}) as writer:
        writer.write(row(3))

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    done = invoke(tmp_path)
    assert done.exit_code == 0
    assert "step 300" in done.output


def test_silence_is_said(tmp_path):
    path = tmp_path / "train.jsonl"
    with Writer(path, config={}) as writer:
        writer.write(row(1))
    follower = Follower(path)
    follower.poll()
    for age, text in ((30, "last row 30 s ago"), (300, "no new row for 5 min"), (9000, "for 2 h")):
        os.utime(path, (time.time() - age, time.time() - age))
        assert text in shown(follower.view())


def test_memory_is_bounded_and_lowerings_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "_MOST_ROWS", 200)
    path = tmp_path / "train.jsonl"
    follower = Follower(path)
    layers = {"a": {"residual": 1.0}}
    with Writer(path, config={}) as writer:
        for k in range(1, 1001):
            writer.write(row(k, lowered=k in (10, 500), layers=layers))
            if k % 20 == 0:
                assert follower.poll()
        assert not follower.poll()
    assert len(follower._rows) <= 200
    assert sum("layers" in r for r in follower._rows) == 1
    assert [r["step"] for r in follower._rows if r["lowered"]] == [1000, 50000]
    assert [r["step"] for r in follower._rows[-30:]] == [100 * k for k in range(971, 1001)]
