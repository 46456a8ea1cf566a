"""A single run: what its record and its checkpoint hold after a kill at a bad moment."""

from itertools import islice

import pytest

from equilibrate.runlog import checkpoints
from equilibrate.runlog import records
from equilibrate.paper.runs import training
from equilibrate.runlog.records import RecordError

SETTINGS = training.Settings(epochs=3, batch_size=100)


def rows(folder):
    return records.read(folder / "train.jsonl").rows


def test_the_disk_holds_a_row_before_the_checkpoint_counts_it(tmp_path, monkeypatch):
    """Else a power cut could leave a checkpoint that no record belongs to."""
    done = []
    sync, save = records.Writer.sync, checkpoints.save
    monkeypatch.setattr(records.Writer, "sync", lambda w: (done.append("sync"), sync(w)))
    monkeypatch.setattr(checkpoints, "save", lambda *x: (done.append("checkpoint"), save(*x)))
    list(training.train(SETTINGS, tmp_path))
    assert done == ["sync", "checkpoint"] * SETTINGS.epochs


@pytest.mark.parametrize("mode", ["new", "overwrite"])
def test_a_run_begun_anew_does_not_go_on_from_an_old_checkpoint(tmp_path, mode):
    list(training.train(SETTINGS, tmp_path))
    whole = rows(tmp_path)
    if mode == "new":
        (tmp_path / "train.jsonl").unlink()
    begun = training.train(SETTINGS, tmp_path, mode=mode)
    with pytest.MonkeyPatch.context() as patch:  # killed in its first epoch
        patch.setattr(training._Run, "advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(begun)
    assert len(list(training.train(SETTINGS, tmp_path, mode="resume"))) == SETTINGS.epochs
    assert rows(tmp_path) == whole


def interrupt(run):
    raise KeyboardInterrupt


def test_a_record_that_was_taken_away_is_missed(tmp_path):
    assert len(list(islice(training.train(SETTINGS, tmp_path), 2))) == 2
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(RecordError, match="holds 0 rows, the checkpoint counts"):
        list(training.train(SETTINGS, tmp_path, mode="resume"))
