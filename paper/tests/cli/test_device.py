"""Names of devices are parsed and checked."""

import pytest
import torch

from equilibrate_paper.cli.device import parse_device
from equilibrate_paper.runs.ranks import Ranks


def test_auto_is_a_gpu_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("auto") == torch.device("cuda")
    assert parse_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("warp", "device='warp' is unknown: use auto, cpu or cuda"),
        ("mps", "device='mps' is not supported: use auto, cpu or cuda"),
        ("cuda:99", r"device='cuda:99' is not available: found \d+ CUDA devices; use cpu"),
    ],
)
def test_unavailable_device_raises(name, message):
    with pytest.raises(ValueError, match=message):
        parse_device(name)


def test_each_process_uses_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    second = Ranks(rank=3, size=4, local_rank=1)
    assert parse_device("auto", second) == torch.device("cuda:1")
    assert parse_device("cpu", second) == torch.device("cpu")
    with pytest.raises(ValueError, match="device='cuda:1' is one GPU for 4 processes: use cuda"):
        parse_device("cuda:1", second)
    with pytest.raises(ValueError, match="device='cuda:2' is not available: found 2 CUDA devices"):
        parse_device("cuda", Ranks(rank=2, size=4, local_rank=2))
