"""Rows survive a kill, an incomplete write and a full disk, and runs are not mixed up."""

import json
import os

import pytest
import torch

from equilibrate.record import jsonl
from equilibrate.record.jsonl import RecordError, Writer, open_locked, read, read_header, write_file

CONFIG = {"lr": 0.1, "seed": 0}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "folder" / "run.jsonl"


def written(path, rows, **options):
    with Writer(path, config=CONFIG, **options) as writer:
        for row in rows:
            writer.write(row)


def test_rows_are_read_back_with_their_environment(path):
    written(path, [{"a": 1, "x": [1.5, float("nan"), float("inf")]}, {"a": 2, "x": "θ"}])
    back = read(path)
    assert back.config == CONFIG
    assert back.rows == [{"a": 1, "x": [1.5, None, None]}, {"a": 2, "x": "θ"}]
    assert {"equilibrate", "commit", "torch", "python", "started"} <= back.environment.keys()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_overwriting_a_run_must_be_requested(path):
    written(path, [])
    written(path, [{"a": 1}])  # there was no row yet
    with pytest.raises(RecordError, match=r"already exists: resume it \(mode='resume', or --resu"):
        Writer(path, config=CONFIG)
    written(path, [{"a": 2}], mode="overwrite")
    assert read(path).rows == [{"a": 2}]
    with pytest.raises(ValueError, match="mode must be 'new', 'resume' or 'overwrite', got 'go'"):
        Writer(path, config=CONFIG, mode="go")  # pyright: ignore[reportArgumentType]


def test_a_row_that_is_not_json_raises_and_is_not_written(path):
    with Writer(path, config=CONFIG) as writer:
        with pytest.raises(TypeError, match=r"Tensor is not JSON .* 'loss' \(Tensor\): pass numb"):
            writer.write({"epoch": 1, "loss": torch.tensor(0.5)})
        writer.write({"epoch": 1, "loss": 0.5})
    assert read(path).rows == [{"epoch": 1, "loss": 0.5}]


def test_resuming_keeps_the_rows_of_the_checkpoint(path):
    written(path, [{"a": k} for k in range(5)], mode="resume", keep=0)
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


def test_resuming_with_a_checkpoint_but_no_record_raises(path):
    """The rows are lost: resuming would leave a record that begins in the middle."""
    with pytest.raises(RecordError, match=r"has 0 rows, but .* saved after 3 rows.*overwrite"):
        Writer(path, config=CONFIG, mode="resume", keep=3)


@pytest.mark.parametrize("torn", [1, 5, 11])
def test_an_incomplete_last_row_is_ignored_and_replaced(path, torn):
    written(path, [{"a": 1}, {"a": 2222222}])
    os.truncate(path, path.stat().st_size - torn)
    assert read(path).rows == [{"a": 1}]
    written(path, [{"a": 3}], mode="resume")
    assert read(path).rows == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize("mode", ["new", "resume"])
def test_an_incomplete_header_is_replaced(tmp_path, mode):
    (tmp_path / "run.jsonl").write_text('{"config": {"na')
    with pytest.raises(RecordError, match=r"run\.jsonl is empty: wait"):
        read(tmp_path / "run.jsonl")
    written(tmp_path / "run.jsonl", [{"a": 1}], mode=mode)
    assert read(tmp_path / "run.jsonl").rows == [{"a": 1}]


def test_how_a_run_ended_is_not_a_row_and_resuming_removes_it(path):
    with Writer(path, config=CONFIG) as writer:
        writer.write({"a": 1})
        writer.end("failed: no memory")
    assert read(path).rows == [{"a": 1}]
    assert (read(path).end or {})["status"] == "failed: no memory"
    written(path, [{"a": 2, "end": "a word of the user"}], mode="resume")
    assert read(path).rows == [{"a": 1}, {"a": 2, "end": "a word of the user"}]
    assert read(path).end is None


def test_a_full_disk_keeps_the_rows_before(path, full_disk):
    with Writer(path, config=CONFIG) as writer:
        writer.write({"a": 1})
        before = path.read_bytes()
        with (
            full_disk(len(before) + 500),
            pytest.raises(RecordError, match=r"File too large\); its 1 rows are safe: free some"),
        ):
            writer.write({"a": "x" * 1000})
        assert path.read_bytes() == before
        writer.write({"a": 3})
        writer.sync()
    assert read(path).rows == [{"a": 1}, {"a": 3}]


def test_one_process_writes(path, monkeypatch):
    monkeypatch.setattr(jsonl, "_WAIT_SECONDS", 0.2)
    first = Writer(path, config=CONFIG)
    for mode in ("new", "resume", "overwrite"):
        with pytest.raises(RecordError, match=r"another run is writing to .*run\.jsonl: wait for"):
            Writer(path, config=CONFIG, mode=mode)
    first.close()
    first.close()
    written(path, [{"a": 1}], mode="resume")
    with open_locked(path), pytest.raises(RecordError, match="another run is writing"):
        open_locked(path)
    with pytest.raises(RecordError, match=r"cannot write to .*: choose a folder you can write to"):
        open_locked(path / "below.jsonl")


@pytest.mark.parametrize("reader", [read, read_header])
def test_a_file_that_is_not_a_record_raises(tmp_path, reader):
    with pytest.raises(RecordError, match=r"none.jsonl does not exist: run the experiment first"):
        reader(tmp_path / "none.jsonl")
    path = tmp_path / "other.jsonl"
    for content in ('{"some": "thing"}\n', "3\n", "hello\n"):
        path.write_text(content)
        with pytest.raises(RecordError, match=r"is not a record of equilibrate: its first line"):
            reader(path)
        for mode in ("new", "resume"):
            with pytest.raises(RecordError, match=r"is not a record of equilibrate"):
                Writer(path, config=CONFIG, mode=mode)
        assert path.read_text() == content


@pytest.mark.parametrize("damage", [b'{"a": 2', b"\xff\xfe", b"[1]", b"", b"\0\0"])
def test_a_damaged_row_is_named_with_file_and_line(path, damage):
    written(path, [{"a": 1}, {"a": 2}, {"a": 3}])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], damage, *lines[3:]]))
    assert read_header(path).config == CONFIG
    with pytest.raises(RecordError, match=r"run\.jsonl is damaged in line 3 \(.*restore it from"):
        read(path)
    with pytest.raises(RecordError, match=r"run\.jsonl is damaged in line 3 \("):
        Writer(path, config=CONFIG, mode="resume")
    written(path, [{"a": "new"}], mode="resume", keep=1)  # line 3 is not needed
    assert [row["a"] for row in read(path).rows] == [1, "new"]


def test_a_file_is_written_completely_or_not_at_all(tmp_path, full_disk):
    path = write_file(tmp_path / "new" / "text.txt", "θ")
    with full_disk(1000), pytest.raises(RecordError, match=r"text.txt \(File too .*: free some sp"):
        write_file(path, b"x" * 2000)
    assert path.read_text() == "θ"
    assert list(path.parent.iterdir()) == [path]
    assert write_file(path, "second").read_text() == "second"
    with pytest.raises(RecordError, match="or choose a folder you can write to"):
        write_file(path / "below.txt", "text")
