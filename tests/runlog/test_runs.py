"""A run is named by its folder or by its record."""

import pytest

from equilibrate.runlog.records import RecordError
from equilibrate.runlog.runs import dropped_path, find_record


def test_a_record_is_found_in_its_folder(tmp_path):
    with pytest.raises(RecordError, match=r"train\.jsonl does not exist: record a run with"):
        find_record(tmp_path)
    with pytest.raises(RecordError, match=r"none\.jsonl does not exist"):
        find_record(tmp_path / "none.jsonl")
    other = tmp_path / "other.jsonl"
    other.touch()
    dropped_path(other).touch()
    assert find_record(tmp_path) == other
    (tmp_path / "more.jsonl").touch()
    with pytest.raises(RecordError, match=r"has several records \(more\.jsonl, other\.jsonl\)"):
        find_record(tmp_path)
    (tmp_path / "train.jsonl").touch()
    assert find_record(tmp_path) == tmp_path / "train.jsonl"
    assert find_record(other) == other
