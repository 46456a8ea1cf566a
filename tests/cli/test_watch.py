"""`equilibrate watch` shows a record that is absent, grows, is cut, and ends."""

import io
import os
import re
import sys
import time

import pytest

from equilibrate import cli
from equilibrate.record.jsonl import Writer
from equilibrate.report.live import view
from equilibrate.report.run import Run


def row(k, **more):
    made = {"step": 100 * k - 1, "lowered": k % 4 == 0, "reason": f"reason {k}", "lrs": [0.1]}
    return {
        "step": 100 * k,
        "time": 1e9 + 2.0 * k,
        "epoch": k,
        "loss": 1 / k,
        "residual": 0.5 / k,
        "margin": 0.02,
        "lrs": [0.1],
        "decisions": [made],
        **more,
    }


@pytest.mark.parametrize("width", [60, 120])
def test_once_shows_everything_that_was_recorded(tmp_path, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    state = {"state": "norm falls"}
    layers = {f"block.{n}.weight": {"residual": (-0.5) ** n, **state} for n in range(10)}
    losses = {"now": 0.167, "after": 0.142, "after_margin": 0.013, "staying": 0.161}
    forecast = {"horizon": 1500, **losses, "gain": 0.025, "gain_margin": 0.006}
    with Writer(tmp_path / "train.jsonl", config={}) as writer:
        for k in range(1, 7):
            writer.write(row(k, layers=layers, forecast=forecast))
        writer.end()
    cli.main(["watch", "--once", str(tmp_path)])
    output = capsys.readouterr().out
    text = " ".join(output.split())
    for part in (
        tmp_path.name,
        "step 600 · epoch 6 · 50 steps/s finished",
        "residual L/R − 1 0.083 ± 0.020",
        "loss 0.167",
        "learning rate 0.1",
        "a cooldown would end at 0.142 ± 0.013",
        "forecast a cooldown over 1,500 steps would end at 0.142 ± 0.013; now 0.167, staying 0.161",
        "last decision, at step 599, lr 0.1 reason 6",
        "lowered 1 ×, last at step 399: reason 4",
        "layers by |L/R − 1|, 8 of 10",
        "block.0.weight 1",
        "norm falls",
    ):
        assert part in text, part
    assert "block.9.weight" not in text
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= width
    assert any("⡇" <= character <= "⣿" for character in output)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_other_characters_shows_it_in_ascii(tmp_path, encoding, monkeypatch):
    folder = tmp_path / "caf\u00e9"
    with Writer(folder / "train.jsonl", config={}) as writer:
        for k in range(1, 9):
            writer.write(row(k, layers={"w": {"residual": -0.5, "margin": 0.1}}))
    printed = io.BytesIO()
    terminal = io.TextIOWrapper(printed, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    cli.main(["watch", "--once", str(folder)])
    cli.main(["report", str(folder)])
    terminal.flush()
    text = printed.getvalue().decode(encoding)
    for part in ("step 800 | epoch 8", "residual L/R - 1  0.062 +- 0.020", "###|", "report  "):
        assert part in text
    assert "?" not in text
    assert re.search(r"\n +1 '", text)  # the curve of the loss begins at the top


@pytest.mark.parametrize("interval", ["nan", "-1", "inf", "soon"])
def test_wrong_intervals_are_named(tmp_path, interval, capsys):
    with pytest.raises(SystemExit):
        cli.main(["watch", "--once", str(tmp_path), f"--interval={interval}"])
    assert f"a number of seconds, at least 0, got {interval}" in capsys.readouterr().err


def test_what_was_not_recorded_is_left_out_and_silence_is_said():
    run = Run("mine", {}, {})
    run.add({"step": 10, "loss": 0.5})
    text = view(run, width=80)
    assert "loss  0.5" in text
    assert not any(
        part in text for part in ("residual", "learning", "cooldown", "decision", "layers")
    )
    for age, words in ((30, "last row 30 s ago"), (300, "no new row for 5 min"), (9000, "for 2 h")):
        assert words in view(run, width=80, age=age)
    assert "\x1b[32m" in view(run, width=80, colours=True)


def test_once_without_a_record_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"train\.jsonl does not exist: record a run with"):
        cli.main(["watch", "--once", str(tmp_path)])


def test_a_run_is_followed_from_before_it_exists_to_its_end(tmp_path, monkeypatch, capsys):
    """What another process would do happens while the command sleeps."""
    path = tmp_path / "late.jsonl"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    texts = []

    def events():
        yield
        writer = Writer(path, config={})
        yield
        writer.write(row(1))
        yield
        with open(path, "ab") as file:
            file.write(b'{"step": 2')
        yield
        writer.close()
        with Writer(path, config={}, mode="overwrite") as writer:
            writer.write(row(7))
            yield
            writer.end("failed: no memory")
        yield

    step = events()

    def sleep(seconds):
        assert seconds >= 0.5
        texts.append(capsys.readouterr().out.rpartition("\x1b[H\x1b[J")[2])
        next(step)

    monkeypatch.setattr(time, "sleep", sleep)
    cli.main(["watch", "--interval", "0.5", str(tmp_path)])
    assert texts[0] == texts[1] == f"Waiting for {tmp_path / 'train.jsonl'} …\n"
    assert texts[2] == f"{path} has no rows yet …\n"
    assert "step 100" in texts[3]
    assert "step 100" in texts[4]  # the last line is not complete
    assert "step 700" in texts[5]
    assert "failed: no memory" in capsys.readouterr().out


def test_ctrl_c_ends_it_quietly(tmp_path, monkeypatch, capsys):
    with Writer(tmp_path / "train.jsonl", config={}) as writer:
        writer.write(row(3))
    os.utime(tmp_path / "train.jsonl")

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    cli.main(["watch", str(tmp_path)])
    assert "step 300" in capsys.readouterr().out
