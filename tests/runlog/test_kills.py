"""Kill -9 at random moments: nothing that was recorded is lost, and the run ends as if undisturbed.

A few kills by default. `make kills` sets EQUILIBRATE_KILLS to 100.
"""

import json
import os
import random

import pytest
from support import forks, recording

KILLS = int(os.environ.get("EQUILIBRATE_KILLS", "5"))
EPOCHS = 45 + 3 * KILLS


def rows(folder):
    """The complete rows without the time, header and end."""
    record = folder / "train.jsonl"
    lines = record.read_bytes().split(b"\n")[:-1] if record.exists() else []
    parsed = [json.loads(line) for line in lines]
    return [row for row in parsed if "step" in row and row.pop("time")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    recording.record_run(folder, EPOCHS)
    assert len(rows(folder)) == EPOCHS
    return rows(folder)


def test_nothing_is_lost_at_any_kill(tmp_path, undisturbed):
    moments, finished, before, progress = random.Random(0), 0, 0, []
    for kill in range(KILLS):
        folder = tmp_path / f"run {finished}"
        process = forks.start(recording.record_run, folder, EPOCHS)
        process.join(moments.expovariate(1 / 0.4))
        recorded = rows(folder)  # what a reader has seen just before the kill
        process.kill()
        process.join()
        found = rows(folder)
        assert found[: len(recorded)] == recorded, f"kill {kill}"
        assert found == undisturbed[: len(found)], f"kill {kill}"
        # At most the row that the last checkpoint does not know is made again.
        assert len(found) >= before - 1, f"kill {kill}"
        progress.append(len(found) - before)
        before = len(found)
        if process.exitcode == 0:
            assert before == len(undisturbed)
            finished, before = finished + 1, 0
    assert sum(gain > 0 for gain in progress) >= KILLS // 4, progress
    folder = tmp_path / f"run {finished}"
    recording.record_run(folder, EPOCHS)
    assert rows(folder) == undisturbed
    assert {"train.jsonl", "checkpoint.pt"} <= {path.name for path in folder.iterdir()}
