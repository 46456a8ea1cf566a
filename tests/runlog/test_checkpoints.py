"""Checkpoints are whole or not there; a damaged one is named and the one before is used."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from equilibrate.runlog import checkpoints
from equilibrate.runlog.checkpoints import CheckpointError


@pytest.fixture
def two(tmp_path):
    path = tmp_path / "run" / "checkpoint.pt"
    for epoch in (1, 2):
        checkpoints.save(path, {"epoch": epoch, "x": torch.arange(1000)})
    return path


def test_the_newest_is_loaded_and_torch_loads_it_too(two):
    assert checkpoints.load(two)["epoch"] == 2
    assert torch.load(two)["epoch"] == 2
    assert not two.with_name("checkpoint.pt.partial").exists()


def test_none_where_there_never_was_one(tmp_path):
    assert checkpoints.load(tmp_path / "none.pt") is None


@pytest.mark.parametrize("damage", ["truncated", "one byte", "empty", "not a checkpoint"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(two, damage):
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
    with pytest.warns(UserWarning, match=r"checkpoint.pt is damaged .* going on from .*previous"):
        state = checkpoints.load(two)
    assert state is not None
    assert state["epoch"] == 1


def test_both_damaged(two):
    for path in (two, two.with_name("checkpoint.pt.previous")):
        path.write_bytes(b"hello")
    with pytest.raises(CheckpointError, match="no earlier one is left, start the run again"):
        checkpoints.load(two)


@pytest.mark.parametrize("calls", [0, 1])
def test_killed_while_saving(two, monkeypatch, calls):
    """Stopped before the first or the second renaming, the older state is still found."""
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


def test_a_pickle_that_would_run_code_is_not_run(two):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch evil",)

    torch.save({"x": Evil()}, two)
    with pytest.warns(UserWarning, match="is damaged"):
        assert checkpoints.load(two)["epoch"] == 1


@pytest.mark.parametrize("odd", [Path("data"), np.float64(0.5), [{"a": slice(3)}]])
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(two, odd):
    with pytest.raises(TypeError, match=r"state holds .*, which torch.load refuses by default"):
        checkpoints.save(two, {"epoch": 3, "odd": odd})
    assert checkpoints.load(two)["epoch"] == 2
    assert not two.with_name("checkpoint.pt.partial").exists()
