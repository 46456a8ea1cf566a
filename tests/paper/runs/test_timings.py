"""Timings are saved once for each run and survive a full disk."""

from dataclasses import replace
from pathlib import Path

import pytest

from equilibrate.paper.runs import timings


def test_full_disk_keeps_the_timings(tmp_path, monkeypatch):
    timing = timings.Timing("a", 4, 10, 500, 2.0, "GPU", "2.11", "tf32")
    timings.save(tmp_path, timing)
    real = Path.write_text

    def half(self, text, **options):
        real(self, text[: len(text) // 2], **options)
        raise OSError("no space left")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="no space left"):
            timings.save(tmp_path, replace(timing, run="b"))
    assert timings.load(tmp_path) == {"a": timing}
    timings.save(tmp_path, replace(timing, run="b"))
    timings.save(tmp_path, replace(timing, seconds=3.0))
    assert [t.seconds for t in timings.load(tmp_path).values()] == [3.0, 2.0]
