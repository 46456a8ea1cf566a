"""Checkpoints are complete or absent; of a damaged one the previous version is loaded."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from equilibrate_paper.runs import checkpoints
from equilibrate_paper.runs.checkpoints import CheckpointError


@pytest.fixture
def two(tmp_path):
    path = tmp_path / "run" / "checkpoint.pt"
    for epoch in (1, 2):
        checkpoints.save(path, {"epoch": epoch, "x": torch.arange(1000)})
    return path


def test_newest_checkpoint_is_loaded_also_by_torch(two):
    assert checkpoints.load(two)["epoch"] == 2
    assert torch.load(two)["epoch"] == 2
    assert not two.with_name("checkpoint.pt.partial").exists()


def test_load_without_a_checkpoint_returns_none(tmp_path):
    assert checkpoints.load(tmp_path / "none.pt") is None


@pytest.mark.parametrize("damage", ["truncated", "one byte", "empty", "not a checkpoint"])
def test_damaged_checkpoint_warns_and_the_previous_one_is_loaded(two, damage):
    data = bytearray(two.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "one byte":
        data[len(data) // 2] ^= 1  # inside the tensor's numbers
    elif damage == "empty":
        data = b""
    else:
        data = b"hello"
    two.write_bytes(data)
    with pytest.warns(UserWarning, match=r"checkpoint.pt is damaged .* using .*previous instead"):
        state = checkpoints.load(two)
    assert state is not None
    assert state["epoch"] == 1


def test_load_raises_when_all_checkpoints_are_damaged(two):
    for path in (two, two.with_name("checkpoint.pt.previous")):
        path.write_bytes(b"hello")
    with pytest.raises(CheckpointError, match="no intact checkpoint is left, restart the run"):
        checkpoints.load(two)


@pytest.mark.parametrize("calls", [0, 1])
def test_kill_during_save_keeps_the_previous_checkpoint(two, monkeypatch, calls):
    """Interrupt before the first or the second rename."""
    real, seen = os.replace, []

    def stop(*args):
        seen.append(args)
        if len(seen) > calls:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(two, {"epoch": 3})
    assert checkpoints.load(two)["epoch"] == 2


def test_load_does_not_run_code_from_a_pickle(two, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Evil:
        def __reduce__(self):
            return os.system, ("touch evil",)

    torch.save({"x": Evil()}, two)
    with pytest.warns(UserWarning, match="is damaged"):
        assert checkpoints.load(two)["epoch"] == 1
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("odd", [Path("data"), np.float64(0.5), [{"a": slice(3)}]])
def test_save_rejects_objects_that_torch_load_rejects(two, odd):
    with pytest.raises(TypeError, match=r"state contains .*, which torch.load does not load"):
        checkpoints.save(two, {"epoch": 3, "odd": odd})
    assert checkpoints.load(two)["epoch"] == 2
    assert {path.name for path in two.parent.iterdir()} == {two.name, f"{two.name}.previous"}


def test_full_disk_is_reported_and_keeps_both_checkpoints(two, full_disk):
    with (
        full_disk(10_000),
        pytest.raises(CheckpointError, match=r"cannot write to .* Checkpoints before it are safe"),
    ):
        checkpoints.save(two, {"epoch": 3, "x": torch.zeros(10_000)})
    assert {path.name for path in two.parent.iterdir()} == {two.name, f"{two.name}.previous"}
    assert checkpoints.load(two)["epoch"] == 2
    assert checkpoints.load(two.with_name("checkpoint.pt.previous"))["epoch"] == 1


def test_remove_removes_the_previous_checkpoint_too(two):
    checkpoints.remove(two)
    assert list(two.parent.iterdir()) == []
    checkpoints.remove(two)  # nothing left to remove
