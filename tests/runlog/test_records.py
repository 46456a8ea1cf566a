"""Rows survive a kill, a torn write and a full disk; runs are not mixed up."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from equilibrate.runlog import records
from equilibrate.runlog.records import RecordError, Writer, read

CONFIG = {"lr": 0.1, "seed": 0}


def written(path, rows, **kwargs):
    with Writer(path, config=CONFIG, **kwargs) as writer:
        for row in rows:
            writer.write(row)


def test_rows_come_back_with_their_environment(tmp_path):
    path = tmp_path / "new" / "folder" / "run.jsonl"
    written(path, [{"a": 1, "x": [1.5, float("nan"), float("inf")]}, {"a": 2, "x": "θ"}])
    back = read(path)
    assert back.config == CONFIG
    assert back.rows == [{"a": 1, "x": [1.5, None, None]}, {"a": 2, "x": "θ"}]
    assert {"equilibrate", "commit", "torch", "python", "started"} <= back.environment.keys()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_a_run_is_not_overwritten_unless_told(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path, [{"a": 1}])
    with pytest.raises(RecordError, match=r"holds an earlier run: resume it, overwrite it"):
        Writer(path, config=CONFIG)
    written(path, [{"a": 2}], mode="overwrite")
    assert read(path).rows == [{"a": 2}]
    with pytest.raises(ValueError, match="mode must be 'new', 'resume' or 'overwrite', got 'go'"):
        Writer(path, config=CONFIG, mode="go")  # pyright: ignore[reportArgumentType]


def test_a_run_that_fails_before_its_first_row_leaves_nothing_to_overwrite(tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match="wrong"), Writer(path, config=CONFIG):
        raise ValueError("wrong settings")
    assert not path.exists()
    writer = Writer(path, config=CONFIG)
    writer.write({"a": 1})
    with pytest.raises(ValueError, match="later"), writer:
        raise ValueError("later")
    assert read(path).rows == [{"a": 1}]


def test_a_row_that_is_no_json_is_told_how_to_be(tmp_path):
    writer = Writer(tmp_path / "run.jsonl", config=CONFIG)
    with pytest.raises(TypeError, match=r"type Tensor is not JSON .* 'loss' \(Tensor\): pass numb"):
        writer.write({"epoch": 1, "loss": torch.tensor(0.5)})
    writer.write({"epoch": 1, "loss": 0.5})
    writer.close()
    assert read(writer.path).rows == [{"epoch": 1, "loss": 0.5}]


def test_resuming_goes_on_after_the_rows_that_are_kept(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path, [{"a": k} for k in range(5)])
    with Writer(path, config=CONFIG, mode="resume") as writer:
        assert writer.count == 5
    with Writer(path, config=CONFIG, mode="resume", keep=3) as writer:
        writer.write({"a": "new"})
        assert writer.count == 4
    assert [row["a"] for row in read(path).rows] == [0, 1, 2, "new"]
    with pytest.raises(RecordError, match="holds 4 rows, the checkpoint counts 9"):
        Writer(path, config=CONFIG, mode="resume", keep=9)
    with pytest.raises(RecordError, match=r"other settings \(lr: 0.1 there, 0.2 here\)"):
        Writer(path, config={"lr": 0.2, "seed": 0}, mode="resume")


def test_resuming_what_was_never_started_starts_it(tmp_path):
    written(tmp_path / "run.jsonl", [{"a": 1}], mode="resume", keep=0)
    assert read(tmp_path / "run.jsonl").rows == [{"a": 1}]


@pytest.mark.parametrize("left", ["nothing", "an empty file"])
def test_a_checkpoint_without_its_record_is_refused(tmp_path, left):
    """Its rows are lost: to go on would leave a record that begins in the middle."""
    path = tmp_path / "run.jsonl"
    if left != "nothing":
        path.touch()
    with pytest.raises(RecordError, match=r"holds 0 rows, the checkpoint counts 3.*overwrite"):
        Writer(path, config=CONFIG, mode="resume", keep=3)


def test_a_row_is_written_whole_however_little_is_taken_at_a_time(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    with Writer(path, config=CONFIG) as writer:
        with monkeypatch.context() as patch:
            write = os.write
            patch.setattr(os, "write", lambda file, data: write(file, data[:3]))
            writer.write({"a": 1})
        writer.write({"a": 2})
    assert read(path).rows == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("torn", [1, 5, 11])
def test_a_torn_last_row_is_left_out_and_then_mended(tmp_path, torn):
    path = tmp_path / "run.jsonl"
    written(path, [{"a": 1}, {"a": 2222222}])
    os.truncate(path, path.stat().st_size - torn)
    assert read(path).rows == [{"a": 1}]
    written(path, [{"a": 3}], mode="resume")
    assert read(path).rows == [{"a": 1}, {"a": 3}]


def test_a_process_killed_while_it_writes_loses_nothing_it_reported(tmp_path):
    path = tmp_path / "run.jsonl"
    code = (
        "import sys\nfrom equilibrate.runlog.records import Writer\n"
        "w = Writer(sys.argv[1], config={})\nk = 0\n"
        "while True:\n"
        "    w.write({'k': k, 'pad': 'x' * 3000})\n    print(k, flush=True)\n    k += 1\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    reported = -1
    deadline = time.monotonic() + 60
    while reported < 200 and time.monotonic() < deadline:
        reported = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait()
    process.stdout.close()
    reported = int(rest[-1]) if rest else reported
    rows = read(path).rows
    assert [row["k"] for row in rows] == list(range(len(rows)))
    assert len(rows) > reported


def test_a_full_disk_is_said_and_the_rows_before_stay_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    writer = Writer(path, config=CONFIG)
    writer.write({"a": 1})
    real, whole = os.write, path.read_bytes()

    def full(file, data):
        real(file, data[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RecordError, match=r"No space left on device\); its 1 rows are safe"):
        writer.write({"a": 2})
    monkeypatch.undo()
    assert path.read_bytes() == whole
    writer.write({"a": 3})
    writer.sync()
    writer.close()
    assert read(path).rows == [{"a": 1}, {"a": 3}]


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write to .*: choose a folder that can be"):
        Writer(tmp_path / "file" / "run.jsonl", config=CONFIG)
    with (
        pytest.raises(RecordError, match="cannot write to"),
        records.lock(tmp_path / "file" / "run"),
    ):
        pass


def test_what_is_no_record_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"none.jsonl does not exist: run the experiment first"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "other.jsonl").write_text('{"some": "thing"}\n')
    with pytest.raises(RecordError, match="is not a record of equilibrate"):
        read(tmp_path / "other.jsonl")


def test_a_second_run_into_one_folder_is_refused_until_the_first_is_gone(tmp_path):
    with (
        records.lock(tmp_path / "run"),
        pytest.raises(RecordError, match="another run is writing to"),
        records.lock(tmp_path / "run"),
    ):
        pass
    with records.lock(tmp_path / "run"):
        pass
