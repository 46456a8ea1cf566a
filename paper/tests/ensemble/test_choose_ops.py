"""The choice between plain and Triton operations."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from paper_support.replicas import ensemble_of
from torch import nn

from equilibrate_paper.ensemble import _ops
from equilibrate_paper.ensemble._ops import choose_ops
from equilibrate_paper.ensemble._ops.plain import PlainOps

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_cpu_uses_plain_operations_with_separate_convolutions():
    ops = choose_ops(CPU, "fp32")
    assert isinstance(ops, PlainOps)
    assert not ops.conv_reads_indices


def test_a_gpu_without_triton_uses_plain_operations_with_grouped_convolutions(monkeypatch):
    monkeypatch.setattr(_ops, "find_spec", lambda name: None)
    ops = choose_ops(GPU, "fp32")
    assert isinstance(ops, PlainOps)
    assert ops.conv_reads_indices


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_gpu_with_triton_uses_triton_operations():
    from equilibrate_paper.ensemble._ops.triton import TritonOps

    assert isinstance(choose_ops(GPU, "tf32"), TritonOps)


def test_an_ensemble_on_a_cpu_does_not_import_the_triton_modules():
    code = (
        "import sys, torch, torch.nn.functional as F\n"
        "from equilibrate_paper.ensemble import Ensemble\n"
        "data = torch.randn(4, 2), torch.zeros(4, dtype=torch.int64)\n"
        "models = [torch.nn.Linear(2, 2)]\n"
        "Ensemble(models, F.cross_entropy, data, seeds=[0], lr=0.1, batch_size=2).run_epoch()\n"
        "print(*(m for m in sys.modules if m.startswith('equilibrate_paper.ensemble._ops.')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    names = {name.removeprefix("equilibrate_paper.ensemble._ops.") for name in loaded}
    assert names == {"plain", "protocol", "side_stream"}


def test_training_with_grouped_and_separate_convolutions_agrees():
    def build():
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    models = [build() for _ in range(3)]
    separate, grouped = (
        ensemble_of(models, shape=(2, 4, 4), _ops=PlainOps(grouped=g)) for g in (False, True)
    )
    torch.testing.assert_close(
        grouped.run_epoch().loss, separate.run_epoch().loss, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        grouped.full_gradient(chunk_size=40), separate.full_gradient(), rtol=1e-3, atol=1e-4
    )
