"""Runs equal a plain training loop, and resume after every kind of failure."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from paper_support.runs import ADAPTIVE, INITIAL, MLP, SEQUENCE, execute_all
from support import forks

from equilibrate.record import jsonl
from equilibrate.record.jsonl import RecordError
from equilibrate_paper.data import datasets
from equilibrate_paper.protocol import models
from equilibrate_paper.protocol.run import PaperRun
from equilibrate_paper.protocol.schedules import Adaptive, PiecewiseConstant
from equilibrate_paper.runs import execute as execution
from equilibrate_paper.runs.errors import Diverged, RunError
from equilibrate_paper.runs.folder import checkpoint_path, record_path


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits")


@pytest.fixture
def every_epoch(monkeypatch):
    """Save a checkpoint after each epoch."""
    monkeypatch.setattr(execution, "CHECKPOINT_SECONDS", 0)


def execute(run, folder, digits, **options):
    execution.execute(run, folder, digits, profile="test", **options)
    return jsonl.read(record_path(folder, run.name)).rows


def lines(folder: Path, name: str) -> list[bytes]:
    """The rows as bytes, without the header, which contains the time."""
    path = record_path(folder, name)
    return path.read_bytes().splitlines()[1:] if path.exists() else []


def half(values):
    """The half-running mean of the paper, in plain NumPy."""
    return float(np.mean(values[len(values) // 2 :]))


def test_sequence_equals_a_plain_loop(tmp_path, digits):
    """Twin: torch.optim.SGD with one model; velocity and averages restart at the milestone."""
    execute(INITIAL, tmp_path, digits)
    rows = execute(SEQUENCE, tmp_path, digits)
    model = execution._initial_models(SEQUENCE, tmp_path)[0]
    ends = {row["epoch"]: row for row in rows if row["epoch"] == int(row["epoch"])}
    parameters = list(model.parameters())
    for epoch in range(5):
        if epoch in (0, 3):
            lr = 0.05 if epoch == 0 else 0.02
            optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01)
            left, right, work, squares = [], [], [], []
        for batch in _batches(epoch):
            before = [p.detach().clone() for p in parameters]
            old = [
                b.clone()
                if (b := optimizer.state[p].get("momentum_buffer")) is not None
                else torch.zeros_like(p)
                for p in parameters
            ]
            _gradient(model, digits, batch, optimizer)
            g = [p.grad + 0.01 * p.detach() for p in parameters]
            optimizer.step()
            new = [optimizer.state[p]["momentum_buffer"] for p in parameters]
            left.append(_dot(before, g))
            right.append(1.9 / 2 * lr * _dot(new, new))
            work.append(-_dot(old, g))
        _gradient(model, digits, slice(None), optimizer)
        full = [p.grad + 0.01 * p.detach() for p in parameters]
        squares.append(_dot(full, full))
        row = ends[epoch + 1]
        assert row["lr"][0] == lr
        assert row["left"][0] == pytest.approx(half(left), rel=1e-3, abs=1e-4)
        assert row["right"][0] == pytest.approx(half(right), rel=1e-3)
        assert row["landscape"][0] == pytest.approx(half(squares) - 0.9 * half(work), rel=2e-3)


def _gradient(model, digits, batch, optimizer):
    optimizer.zero_grad()
    outputs = model(digits.train_images[batch])
    torch.nn.functional.cross_entropy(outputs, digits.train_labels[batch]).backward()


def _batches(epoch):
    from equilibrate_paper.ensemble import sampling

    return torch.from_numpy(sampling.draw(5, epoch, 1500, 100, "shuffled"))


def _dot(a, b):
    return float(sum((x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)))


def test_rows_are_at_log_spaced_steps_and_at_epoch_ends(tmp_path, digits):
    rows = execute(INITIAL, tmp_path, digits)
    steps = [row["step"] for row in rows]
    assert steps[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13]
    assert steps == sorted(set(steps))
    assert [row["step"] for row in rows if "landscape" in row] == [15, 30, 45]
    assert [row["epoch"] for row in rows] == pytest.approx([step / 15 for step in steps], rel=1e-6)


def test_fewer_rows_have_the_same_numbers(tmp_path, digits):
    """Rows every fourth epoch, in spite of gradients after every third."""
    execute(INITIAL, tmp_path, digits)
    run = replace(SEQUENCE, gradient_every=3)
    every = execute(replace(run, name="every"), tmp_path, digits)
    fewer = execute(replace(run, name="fewer", record_every=4), tmp_path, digits)
    assert all(row in every for row in fewer)
    ends = [row["epoch"] for row in fewer if row["step"] % 15 == 0]
    assert ends == [3, 4, 8, 12]  # the phase ends after 3 and 12 epochs
    assert [row["epoch"] for row in fewer if "landscape" in row] == [3, 12]


def test_each_arm_follows_its_schedule(tmp_path, digits):
    arms = {
        "preset": PiecewiseConstant(((0.1, 2), (0.01, 2))),
        "adaptive": Adaptive(0.1, 4, threshold=1e9, factor=0.5),  # lowers each time
        "never": Adaptive(0.1, 4, threshold=1e-12, factor=0.5),
    }
    rows = execute(PaperRun("s", MLP, arms, (0, 1), "performance"), tmp_path, digits)
    lrs = np.array([row["lr"] for row in rows])
    assert lrs[:, 0] == pytest.approx([0.1, 0.1, 0.01, 0.01])
    assert lrs[:, 2] == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    assert lrs[:, 4] == pytest.approx([0.1] * 4)
    losses = np.array([row["train_loss"] for row in rows])
    assert (
        losses[0, 0] == losses[0, 2] == losses[0, 4]
    )  # equal seeds have equal weights in all arms
    assert losses[0, 0] != losses[0, 1]


def test_training_loss_includes_the_l2_term(tmp_path, digits):
    run = PaperRun("s", MLP, {"preset": PiecewiseConstant(((1e-9, 1),))}, (0,), "performance")
    (row,) = execute(run, tmp_path, digits)
    model = models.build("digits-mlp", 0)
    entropy = torch.nn.functional.cross_entropy(model(digits.train_images), digits.train_labels)
    norm = sum(p.square().sum() for p in model.parameters())
    assert row["train_loss"][0] == pytest.approx((entropy + 0.005 * norm).item(), rel=1e-5)


@pytest.mark.slow
def test_killed_run_ends_with_the_same_bytes(tmp_path, digits):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run in (INITIAL, SEQUENCE, ADAPTIVE):
        execute(run, whole, digits)
    names = ("initial", "sequence", "adaptive")
    for target in (20, 60, 105):  # total number of rows at the kill
        process = forks.start(execute_all, killed)
        while sum(len(lines(killed, name)) for name in names) < target:
            assert process.is_alive()
            time.sleep(0.002)
        process.kill()
        process.join()
    for run in (INITIAL, SEQUENCE, ADAPTIVE):
        execute(run, killed, digits)
    for name in names:
        assert lines(killed, name) == lines(whole, name)


def stop_at(last):
    """Return a progress callback that interrupts the run after `last` epochs."""

    def stop(epoch):
        if epoch == last:
            raise KeyboardInterrupt

    return stop


@pytest.mark.usefixtures("every_epoch")
def test_run_interrupted_after_every_epoch_ends_with_the_same_bytes(tmp_path, digits):
    """With sparse gradients and independent batches."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run = replace(SEQUENCE, gradient_every=4, sampling="independent")
    for folder in (whole, stopped):
        execute(INITIAL, folder, digits)
    execute(run, whole, digits)
    for epoch in range(1, run.epochs):
        with pytest.raises(KeyboardInterrupt):
            execute(run, stopped, digits, progress=stop_at(epoch))
    execute(run, stopped, digits)
    assert lines(stopped, "sequence") == lines(whole, "sequence")


@pytest.mark.parametrize("how", ["overwritten", "removed", "emptied"])
def test_restarted_run_does_not_use_an_old_checkpoint(tmp_path, digits, how):
    execute(INITIAL, tmp_path, digits)
    before = lines(tmp_path, "initial")
    record = record_path(tmp_path, "initial")
    if how == "removed":
        record.unlink()
    elif how == "emptied":
        record.write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        execute(INITIAL, tmp_path, digits, overwrite=how == "overwritten", progress=stop_at(1))
    execute(INITIAL, tmp_path, digits)
    assert lines(tmp_path, "initial") == before


def test_damaged_checkpoint_raises_and_says_what_to_do(tmp_path, digits):
    execute(INITIAL, tmp_path, digits)
    path = checkpoint_path(tmp_path, "initial")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RunError, match=r"initial\.pt is damaged .*: overwrite the run"):
        execute(INITIAL, tmp_path, digits)
    execute(INITIAL, tmp_path, digits, overwrite=True)


def test_finished_record_does_not_need_its_checkpoint(tmp_path, digits):
    execute(INITIAL, tmp_path, digits)
    before = lines(tmp_path, "initial")
    checkpoint_path(tmp_path, "initial").unlink()
    execute(INITIAL, tmp_path, digits)
    assert lines(tmp_path, "initial") == before
    assert not checkpoint_path(tmp_path, "initial").exists()
    with pytest.raises(RunError, match=r"initial\.pt does not exist: remove .*initial\.jsonl"):
        execute(SEQUENCE, tmp_path, digits)


def test_other_settings_raise(tmp_path, digits):
    execute(INITIAL, tmp_path, digits)
    with pytest.raises(jsonl.RecordError, match="other settings"):
        execute(replace(INITIAL, momentum=0.5), tmp_path, digits)


def test_diverging_loss_raises_and_keeps_the_rows(tmp_path, digits):
    run = PaperRun(
        "wild", MLP, {"initial": PiecewiseConstant(((0.1, 2), (1e30, 2)))}, (0, 1), "landscape"
    )
    with pytest.raises(Diverged, match=r"wild: the loss became NaN in epoch 3 .*seed 0.*1e\+30"):
        execute(run, tmp_path, digits)
    rows = jsonl.read(record_path(tmp_path, "wild")).rows
    assert rows[-1]["epoch"] == 2


@pytest.mark.usefixtures("every_epoch")
@pytest.mark.parametrize("size", [3000, 30_000], ids=["rows", "checkpoint"])
def test_full_disk_raises_and_keeps_the_rows(tmp_path, digits, full_disk, size):
    """The disk is too full for the rows, or for the checkpoint."""
    folder = tmp_path / "full"
    with (
        full_disk(size),
        pytest.raises((jsonl.RecordError, RecordError), match=r"cannot write to .*free some"),
    ):
        execute(INITIAL, folder, digits)
    for line in lines(folder, "initial"):
        json.loads(line)
    for run in (INITIAL, SEQUENCE):  # without the limit the run continues
        execute(run, folder, digits)
        execute(run, tmp_path / "whole", digits)
        assert lines(folder, run.name) == lines(tmp_path / "whole", run.name)


def test_sequence_without_its_initial_run_raises(tmp_path, digits):
    with pytest.raises(
        RunError, match=r"sequence starts from the end of initial, but .*initial.pt does not"
    ):
        execute(SEQUENCE, tmp_path, digits)
