"""A record is followed while it grows, is cut, is replaced and ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibrate.runlog.records import RecordError, Writer, read
from equilibrate.runlog.tail import Tail


def test_rows_come_once_and_complete(tmp_path):
    path = tmp_path / "run.jsonl"
    tail = Tail(path)
    assert (tail.poll().rows, tail.header) == ([], None)
    with Writer(path, config={"lr": 0.1}) as writer:
        writer.write({"k": 1})
        assert tail.poll().rows == [{"k": 1}]
        assert tail.header is not None
        assert tail.header.config == {"lr": 0.1}
        assert tail.poll().rows == []
        with open(path, "ab") as file:
            file.write(b'{"k": 2')
        assert tail.poll().rows == []
        with open(path, "ab") as file:
            file.write(b', "name": "\xce\xb8"}\n')
        assert tail.poll().rows == [{"k": 2, "name": "θ"}]
        assert tail.end is None
        writer.end()
    assert tail.poll().rows == []
    assert tail.end is not None
    assert tail.end.status == "finished"


@pytest.mark.parametrize("longer", [False, True])
def test_a_record_that_is_cut_or_replaced_is_read_again(tmp_path, longer):
    path = tmp_path / "run.jsonl"
    with Writer(path, config={}) as writer:
        for k in range(6):
            writer.write({"k": k})
    tail = Tail(path)
    assert len(tail.poll().rows) == 6
    with Writer(path, config={}, mode="resume", keep=3) as writer:
        for k in range(9 if longer else 1):
            writer.write({"k": 10 + k})
    update = tail.poll()
    assert update.restarted
    assert [row["k"] for row in update.rows] == [0, 1, 2, *range(10, 19 if longer else 11)]
    assert not tail.poll().restarted
    path.unlink()
    assert tail.poll().restarted
    assert not tail.poll().restarted
    assert tail.header is None


def test_what_is_not_a_record_raises(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("hello\n")
    with pytest.raises(RecordError, match="is not a record of equilibrate"):
        Tail(path).poll()
    path.write_text("[]\n")
    with pytest.raises(RecordError, match="its first line has no config and environment"):
        Tail(path).poll()


def test_damaged_line_is_named(tmp_path):
    """The line is counted from the beginning of the file, not from the last poll."""
    path = tmp_path / "run.jsonl"
    with Writer(path, config={}) as writer:
        writer.write({"k": 0})
        tail = Tail(path)
        assert len(tail.poll().rows) == 1
        writer.write({"k": 1})
    with open(path, "ab") as file:
        file.write(b"\x00\x00\n")
    with pytest.raises(RecordError, match=r"run\.jsonl is damaged in line 4 \("):
        tail.poll()
    with pytest.raises(RecordError, match=r"run\.jsonl is damaged in line 4 \("):
        Tail(path).poll()


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("tail") / "whole.jsonl"
    with Writer(path, config={}) as writer:
        for k in range(5):
            writer.write({"k": k, "x": "θ" * k})
    return path


@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), max_size=12))
def test_any_way_of_reading_in_parts_gives_all_rows(record, sizes):
    data, part = record.read_bytes(), record.with_name("part.jsonl")
    part.unlink(missing_ok=True)
    tail, rows = Tail(part), []
    end = data.index(b"\n") - 3  # near the end of the header, which is long
    for size in [*sizes, len(data)]:
        end = min(end + size, len(data))
        part.write_bytes(data[:end])
        update = tail.poll()
        assert not update.restarted
        rows += update.rows
    assert rows == read(record).rows
