"""Only one process writes to a folder, and a killed process does not block the next one."""

from multiprocessing import Pipe

import pytest
from support import forks, recording

from equilibrate.runlog.lock import lock, lock_record
from equilibrate.runlog.records import RecordError


def test_second_lock_raises_until_the_first_is_released(tmp_path):
    with (
        lock(tmp_path / "run"),
        pytest.raises(RecordError, match=r"another run is writing to .*run: wait for it to end"),
        lock(tmp_path / "run"),
    ):
        pass
    with lock(tmp_path / "run"):
        pass


def test_lock_is_released_when_the_block_fails(tmp_path):
    with pytest.raises(KeyboardInterrupt), lock(tmp_path):
        raise KeyboardInterrupt
    with lock(tmp_path):
        pass


def test_killed_process_releases_the_lock(tmp_path):
    here, there = Pipe()
    process = forks.start(recording.hold_lock, tmp_path, there)
    assert here.recv() == "locked"
    with pytest.raises(RecordError, match="another run is writing to"), lock(tmp_path):
        pass
    process.kill()
    process.join()
    with lock(tmp_path):
        pass


def test_folder_that_cannot_be_written_to_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RecordError, match=r"cannot write to .*: choose a folder you can write to"),
        lock(tmp_path / "file" / "run"),
    ):
        pass


def test_records_in_one_folder_are_locked_one_by_one(tmp_path):
    first = lock_record(tmp_path / "run" / "a.jsonl")
    lock_record(tmp_path / "run" / "b.jsonl").release()
    with pytest.raises(RecordError, match=r"another run is writing to .*a\.jsonl: wait for it"):
        lock_record(tmp_path / "run" / "a.jsonl", timeout=0)
    first.release()
    lock_record(tmp_path / "run" / "a.jsonl", timeout=0).release()
