"""Rows survive a kill, an incomplete write and a full disk, and runs are not mixed up."""

import contextlib
import json
import os
from multiprocessing import Pipe

import pytest
import torch
from support import forks, recording

from equilibrate.runlog.records import RecordError, Writer, read, read_header

CONFIG = {"lr": 0.1, "seed": 0}


def written(path, rows, **kwargs):
    with Writer(path, config=CONFIG, **kwargs) as writer:
        for row in rows:
            writer.write(row)


def test_rows_are_read_back_with_their_environment(tmp_path):
    path = tmp_path / "new" / "folder" / "run.jsonl"
    written(path, [{"a": 1, "x": [1.5, float("nan"), float("inf")]}, {"a": 2, "x": "θ"}])
    back = read(path)
    assert back.config == CONFIG
    assert back.rows == [{"a": 1, "x": [1.5, None, None]}, {"a": 2, "x": "θ"}]
    assert {"equilibrate", "commit", "torch", "python", "started"} <= back.environment.keys()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_overwriting_a_run_must_be_requested(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path, [{"a": 1}])
    with pytest.raises(
        RecordError, match=r"already exists: resume it \(mode='resume', or --resume"
    ):
        Writer(path, config=CONFIG)
    written(path, [{"a": 2}], mode="overwrite")
    assert read(path).rows == [{"a": 2}]
    with pytest.raises(ValueError, match="mode must be 'new', 'resume' or 'overwrite', got 'go'"):
        Writer(path, config=CONFIG, mode="go")  # pyright: ignore[reportArgumentType]


def test_run_that_fails_before_its_first_row_leaves_no_file(tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match="wrong"), Writer(path, config=CONFIG):
        raise ValueError("wrong settings")
    assert not path.exists()
    writer = Writer(path, config=CONFIG)
    writer.write({"a": 1})
    with pytest.raises(ValueError, match="later"), writer:
        raise ValueError("later")
    assert read(path).rows == [{"a": 1}]


def test_row_that_is_not_json_raises_type_error(tmp_path):
    writer = Writer(tmp_path / "run.jsonl", config=CONFIG)
    with pytest.raises(TypeError, match=r"type Tensor is not JSON .* 'loss' \(Tensor\): pass numb"):
        writer.write({"epoch": 1, "loss": torch.tensor(0.5)})
    writer.write({"epoch": 1, "loss": 0.5})
    writer.close()
    assert read(writer.path).rows == [{"epoch": 1, "loss": 0.5}]


def test_resume_continues_after_the_kept_rows(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path, [{"a": k} for k in range(5)])
    with Writer(path, config=CONFIG, mode="resume") as writer:
        assert writer.count == 5
    with Writer(path, config=CONFIG, mode="resume", keep=3) as writer:
        writer.write({"a": "new"})
        assert writer.count == 4
    assert [row["a"] for row in read(path).rows] == [0, 1, 2, "new"]
    with pytest.raises(RecordError, match="has 4 rows, but the checkpoint was saved after 9 rows"):
        Writer(path, config=CONFIG, mode="resume", keep=9)
    with pytest.raises(RecordError, match=r"other settings \(lr: 0.1 in the file, 0.2 now\)"):
        Writer(path, config={"lr": 0.2, "seed": 0}, mode="resume")


def test_resume_without_a_file_starts_a_new_record(tmp_path):
    written(tmp_path / "run.jsonl", [{"a": 1}], mode="resume", keep=0)
    assert read(tmp_path / "run.jsonl").rows == [{"a": 1}]


@pytest.mark.parametrize("left", ["nothing", "an empty file"])
def test_resume_with_a_checkpoint_but_no_record_raises(tmp_path, left):
    """The rows are lost: resuming would leave a record that begins in the middle."""
    path = tmp_path / "run.jsonl"
    if left != "nothing":
        path.touch()
    with pytest.raises(RecordError, match=r"has 0 rows, but .* saved after 3 rows.*overwrite"):
        Writer(path, config=CONFIG, mode="resume", keep=3)


class Disk:
    """A file that accepts `accepted` bytes at a time and fails after `space` bytes."""

    def __init__(self, file, accepted=3, space=10**9):
        self.file, self.accepted, self.space = file, accepted, space

    def write(self, data):
        size = min(self.accepted, self.space, len(data))
        if size == 0:
            raise OSError(28, "No space left on device")
        self.space -= size
        return self.file.write(data[:size])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_row_is_complete_when_each_write_accepts_a_few_bytes(tmp_path):
    path = tmp_path / "run.jsonl"
    with Writer(path, config=CONFIG) as writer:
        file = writer._file
        writer._file = Disk(file)
        writer.write({"a": 1})
        writer._file = file
        writer.write({"a": 2})
    assert read(path).rows == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("torn", [1, 5, 11])
def test_incomplete_last_row_is_ignored_and_replaced_on_resume(tmp_path, torn):
    path = tmp_path / "run.jsonl"
    written(path, [{"a": 1}, {"a": 2222222}])
    os.truncate(path, path.stat().st_size - torn)
    assert read(path).rows == [{"a": 1}]
    written(path, [{"a": 3}], mode="resume")
    assert read(path).rows == [{"a": 1}, {"a": 3}]


def test_killed_process_loses_no_row_that_it_reported(tmp_path):
    path = tmp_path / "run.jsonl"
    here, there = Pipe(duplex=False)
    process = forks.start(recording.write_rows, path, there)
    there.close()
    reported = -1
    while reported < 200:
        reported = here.recv()
    process.kill()
    process.join()
    with contextlib.suppress(EOFError):
        while True:  # what it has reported before the kill
            reported = here.recv()
    rows = read(path).rows
    assert [row["k"] for row in rows] == list(range(len(rows)))
    assert len(rows) > reported


def test_full_disk_raises_and_keeps_the_rows_before(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = Writer(path, config=CONFIG)
    writer.write({"a": 1})
    file, before = writer._file, path.read_bytes()
    writer._file = Disk(file, space=4)
    with pytest.raises(RecordError, match=r"No space left on device\); its 1 rows are safe"):
        writer.write({"a": 2})
    writer._file = file
    assert path.read_bytes() == before
    writer.write({"a": 3})
    writer.sync()
    writer.close()
    assert read(path).rows == [{"a": 1}, {"a": 3}]


def test_folder_that_cannot_be_written_to_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write to .*: choose a folder you can write to"):
        Writer(tmp_path / "file" / "run.jsonl", config=CONFIG)


@pytest.mark.parametrize("reader", [read, read_header])
def test_file_that_is_not_a_record_raises(tmp_path, reader):
    with pytest.raises(RecordError, match=r"none.jsonl does not exist: run the experiment first"):
        reader(tmp_path / "none.jsonl")
    for content, reason in (
        ('{"some": "thing"}\n', "its first line has no config and environment"),
        ("3\n", "its first line has no config and environment"),
        ("hello\n", "Expecting value"),
        ("", "Expecting value"),
    ):
        (tmp_path / "other.jsonl").write_text(content)
        with pytest.raises(RecordError, match=rf"is not a record of equilibrate \({reason}"):
            reader(tmp_path / "other.jsonl")


def test_header_is_read_without_the_rows(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path, [{"a": 1}])
    with open(path, "ab") as file:
        file.write(b"not JSON\n")  # a reader of the rows fails here
    header = read_header(path)
    assert header.config == CONFIG
    assert "torch" in header.environment
    with pytest.raises(RecordError, match="is damaged in line 3"):
        read(path)


def test_how_a_run_ended_is_not_a_row_and_resuming_removes_it(tmp_path):
    path = tmp_path / "run.jsonl"
    with Writer(path, config=CONFIG) as writer:
        writer.write({"a": 1})
        writer.end("failed: no memory")
    back = read(path)
    assert back.rows == [{"a": 1}]
    assert back.end is not None
    assert back.end.status == "failed: no memory"
    with Writer(path, config=CONFIG, mode="resume") as writer:
        assert writer.count == 1
        writer.write({"a": 2, "end": "a word of the user"})
    assert read(path).rows == [{"a": 1}, {"a": 2, "end": "a word of the user"}]
    assert read(path).end is None


def test_settings_that_may_change_are_replaced_in_the_header(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path, [{"a": k} for k in range(3)])
    environment = read(path).environment
    more = {"config": {**CONFIG, "seed": 7}, "may_change": ("seed",)}
    with Writer(path, **more, mode="resume", keep=2) as writer:
        writer.write({"a": "new"})
    back = read(path)
    assert back.config == {"lr": 0.1, "seed": 7}
    assert back.environment == environment
    assert [row["a"] for row in back.rows] == [0, 1, "new"]
    with pytest.raises(RecordError, match=r"other settings \(lr: 0.1 in the file, 0.2 now\)"):
        Writer(path, config={"lr": 0.2, "seed": 0}, may_change=("seed",), mode="resume")
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_while_the_header_is_replaced_keeps_the_record(tmp_path, full_disk):
    path = tmp_path / "run.jsonl"
    written(path, [{"a": 1}])
    before = path.read_bytes()
    with full_disk(100), pytest.raises(RecordError, match="Its 1 rows are safe"):
        Writer(path, config={"lr": 0.1, "seed": 7}, may_change=("seed",), mode="resume")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_at_the_start_leaves_no_file(tmp_path, full_disk):
    with full_disk(50), pytest.raises(RecordError, match="its 0 rows are safe"):
        Writer(tmp_path / "run.jsonl", config=CONFIG)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b'{"a": 2', b"\xff\xfe", b"[1]", b""])
def test_damaged_row_is_named_with_file_and_line(tmp_path, damage):
    path = tmp_path / "run.jsonl"
    written(path, [{"a": 1}, {"a": 2}, {"a": 3}])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], damage, *lines[3:]]))
    with pytest.raises(RecordError, match=r"run\.jsonl is damaged in line 3 \(.*restore it from"):
        read(path)
    with pytest.raises(RecordError, match=r"run\.jsonl is damaged in line 3 \("):
        Writer(path, config=CONFIG, mode="resume")
    with Writer(path, config=CONFIG, mode="resume", keep=1) as writer:  # line 3 is not needed
        writer.write({"a": "new"})
    assert [row["a"] for row in read(path).rows] == [1, "new"]


def test_resume_of_a_file_that_is_not_a_record_raises(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("hello\n")
    with pytest.raises(RecordError, match=r"run\.jsonl is not a record of equilibrate"):
        Writer(path, config=CONFIG, mode="resume")
    assert path.read_text() == "hello\n"
