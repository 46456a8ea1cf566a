"""A training run resumes correctly whenever it was interrupted."""

from itertools import islice

import pytest

from equilibrate.runlog import records
from equilibrate.runlog.records import RecordError
from equilibrate_paper.runs import checkpoints, training

SETTINGS = training.Settings(epochs=3, batch_size=100)


def rows(folder):
    return records.read(folder / "train.jsonl").rows


def test_row_is_flushed_before_the_checkpoint_counts_it(tmp_path, monkeypatch):
    """Otherwise a power failure could leave a checkpoint with more rows than the record."""
    done = []
    sync, save = records.Writer.sync, checkpoints.save
    monkeypatch.setattr(records.Writer, "sync", lambda w: (done.append("sync"), sync(w)))
    monkeypatch.setattr(checkpoints, "save", lambda *x: (done.append("checkpoint"), save(*x)))
    list(training.train(SETTINGS, tmp_path))
    assert done == ["sync", "checkpoint"] * SETTINGS.epochs


@pytest.mark.parametrize("mode", ["new", "overwrite"])
def test_new_run_does_not_use_an_old_checkpoint(tmp_path, mode):
    list(training.train(SETTINGS, tmp_path))
    expected = rows(tmp_path)
    if mode == "new":
        (tmp_path / "train.jsonl").unlink()
    begun = training.train(SETTINGS, tmp_path, mode=mode)
    with pytest.MonkeyPatch.context() as patch:  # interrupted in its first epoch
        patch.setattr(training._Run, "advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(begun)
    assert len(list(training.train(SETTINGS, tmp_path, mode="resume"))) == SETTINGS.epochs
    assert rows(tmp_path) == expected


def interrupt(run):
    raise KeyboardInterrupt


def test_resume_raises_when_the_record_is_missing(tmp_path):
    assert len(list(islice(training.train(SETTINGS, tmp_path), 2))) == 2
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(RecordError, match="has 0 rows, but the checkpoint was saved after"):
        list(training.train(SETTINGS, tmp_path, mode="resume"))
