"""Parameters in a single process, and the device on which a process group reduces numbers."""

import pytest
import torch
from torch import nn

from equilibrate.watching import sharding
from equilibrate.watching.sharding import Layout


def test_plain_parameters_are_whole():
    params = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))]
    layout = Layout(params)
    assert layout.processes == 1
    assert [layout.shards(p) for p in params] == [1, 1]
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    totals = layout.total(parts)
    assert [total.tolist() for total in totals] == [[1, 2], [[3]]]
    totals[0].zero_()
    assert parts[0].tolist() == [1, 2]  # a copy
    assert layout.total([]) == []


@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda"),  # offloaded parameters
        ("cpu:mpi", "cpu", "cpu"),
    ],
)
def test_numbers_are_reduced_where_the_backend_can(monkeypatch, backends, device, expected):
    monkeypatch.setattr(sharding.dist, "get_backend_config", lambda group: backends)
    assert sharding.device_for(None, torch.device(device)) == torch.device(expected)
