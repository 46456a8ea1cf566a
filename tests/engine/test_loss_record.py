"""Losses are recorded in bounded memory, and resumed as they were."""

import pytest
import torch
import torch.distributed as dist

from equilibrate._engine.cooldown import loss_record
from equilibrate._engine.cooldown.loss_record import LossRecord


def test_losses_and_steps():
    record = LossRecord()
    record.restart(10)
    record.add(15, 2.0)
    record.add(20, torch.tensor(1.5, requires_grad=True))
    record.add(25, torch.tensor([1.0], dtype=torch.bfloat16))
    losses = record.losses()
    assert (losses.start, losses.steps, losses.values) == (10, (15, 20, 25), (2.0, 1.5, 1.0))
    record.restart(25)
    assert record.losses().steps == ()


def test_neighbours_are_merged_when_the_memory_is_full(monkeypatch):
    monkeypatch.setattr(loss_record, "_CAPACITY", 8)
    record = LossRecord()
    for step in range(1, 22):
        record.add(step, float(step))
    losses = record.losses()
    assert len(losses.steps) <= 8
    assert losses.steps[-1] == 21
    begins = (0, *losses.steps[:-1])
    means = [(b + 1 + e) / 2 for b, e in zip(begins, losses.steps, strict=True)]
    assert losses.values == pytest.approx(means)


def test_losses_of_the_host_are_added_up_where_the_processes_can(monkeypatch):
    """NCCL has no way to add up numbers of the host."""
    places = []

    def all_reduce(tensor):
        places.append(tensor.device.type)
        raise InterruptedError

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "meta:nccl")
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    record = LossRecord()
    record.add(1, 0.5)
    with pytest.raises(InterruptedError):
        record.losses()
    assert places == ["meta"]


def test_state_is_restored(tmp_path):
    record, other = LossRecord(), LossRecord()
    record.restart(3)
    for step in range(600):
        record.add(step, torch.tensor(float(step)))
    torch.save(record.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for each in (record, other):
        each.add(600, 1.0)
    assert other.losses() == record.losses()
