"""Timings are saved once for each run and survive a full disk."""

from dataclasses import replace

import pytest

from equilibrate.runlog.files import WriteError
from equilibrate_paper.runs import timings


def test_full_disk_keeps_the_timings(tmp_path, full_disk):
    timing = timings.Timing("a", 4, 10, 500, 2.0, "GPU", "2.11", "tf32")
    timings.save(tmp_path, timing)
    size = (tmp_path / "timings.jsonl").stat().st_size
    with (
        full_disk(size + 10),
        pytest.raises(WriteError, match=r"timings\.jsonl \(File too"),
    ):
        timings.save(tmp_path, replace(timing, run="b"))
    assert timings.load(tmp_path) == {"a": timing}
    timings.save(tmp_path, replace(timing, run="b"))
    timings.save(tmp_path, replace(timing, seconds=3.0))
    assert [t.seconds for t in timings.load(tmp_path).values()] == [3.0, 2.0]
