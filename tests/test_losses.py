"""Losses are recorded in bounded memory, and how fast they fall is estimated."""

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
def test_the_fall_is_the_slope_of_a_line_through_the_later_half(kind, count):
    """Also where thousands of losses share 512 rows; its error covers the truth at 5 sigma."""
    noise = np.random.default_rng(0).normal(size=count)
    values = 3 - 0.002 * np.arange(count) + 0.1 * noise
    fall = recorded(kind(value) for value in values.tolist()).fall()
    slope = np.polyfit(np.arange(count // 2, count), values[count // 2 :], 1)[0]
    assert fall.value == pytest.approx(-slope, abs=fall.stderr)
    assert abs(fall.value - 0.002) < 5 * fall.stderr
    spread = math.sqrt(12) * 0.1 / (count / 2) ** 1.5
    assert fall.stderr == pytest.approx(spread, rel=0.6)


def test_losses_that_are_missing_or_not_finite_are_left_out():
    values = [3 - 0.01 * t for t in range(200)]
    holes = [None if t % 7 == 0 else math.nan if t % 11 == 0 else v for t, v in enumerate(values)]
    assert recorded(holes).fall().value == pytest.approx(0.01, rel=0.1)
    assert math.isnan(recorded([1.0] * 4).fall().value)
    assert "finite" in recorded([math.inf] * 40).fall().method


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
        recorded([0.5]).fall()
    assert places == ["meta"]


def test_the_state_is_restored(tmp_path):
    losses, other = recorded(torch.linspace(3, 1, 700)), Losses()
    torch.save(losses.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for each in (losses, other):
        each.add(0.5)
    assert other.fall() == losses.fall()
