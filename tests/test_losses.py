"""Losses are recorded in bounded memory."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from equilibrate.forecast.losses import Losses


def recorded(values):
    losses = Losses()
    for value in values:
        losses.add(value)
    return losses


@pytest.mark.parametrize("count", [40, 5000])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_blocks_are_the_means_of_the_later_half(kind, count):
    """Also where thousands of losses share 512 rows."""
    values = np.random.default_rng(0).normal(3.0, 0.1, count)
    ago, means, counts = recorded(kind(value) for value in values.tolist()).blocks()
    half = int(counts.sum())
    assert half == pytest.approx(count / 2, abs=count / 200)
    assert (means * counts).sum() == pytest.approx(values[-half:].sum(), rel=1e-6)
    ends = count - half + np.cumsum(counts)
    assert ago == pytest.approx(count - ends + counts / 2)
    for end, mean, size in list(zip(ends, means, counts, strict=True))[:: len(ago) // 5]:
        assert mean == pytest.approx(values[int(end - size) : int(end)].mean(), rel=1e-6)


def test_losses_that_are_missing_or_not_finite_are_left_out():
    values = [3 - 0.01 * t for t in range(200)]
    holes = [None if t % 7 == 0 else math.nan if t % 11 == 0 else v for t, v in enumerate(values)]
    ago, means, counts = recorded(holes).blocks()
    assert counts.sum() == sum(t % 7 > 0 and t % 11 > 0 for t in range(100, 200))
    assert means == pytest.approx([values[int(200 - a)] for a in ago])
    assert len(recorded([math.inf] * 40).blocks()[0]) == 0


def test_memory_does_not_grow():
    state = recorded(float(t) for t in range(20_000)).state_dict()
    assert state is not None
    assert sum(tensor.numel() for tensor in state.values()) < 2000


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
    with pytest.raises(InterruptedError):
        recorded([0.5]).blocks(shared=True)
    assert places == ["meta"]


def test_the_state_is_restored(tmp_path):
    losses, other = recorded(torch.linspace(3, 1, 700)), Losses()
    torch.save(losses.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for each in (losses, other):
        each.add(0.5)
    for found, expected in zip(other.blocks(), losses.blocks(), strict=True):
        assert found.tolist() == expected.tolist()
