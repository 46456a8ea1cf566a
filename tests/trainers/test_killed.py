"""A training on two processes (DDP, gloo) that is killed and resumed is the uninterrupted one."""

import pytest
import torch
from support.torchrun import torchrun

BEGIN = 240
"""The step of the last checkpoint. The run is killed at step 255."""


@pytest.mark.parametrize("module", ["support.lightning_task", "support.hf_task"])
def test_a_killed_run_resumes_under_ddp(module, tmp_path):
    straight = torchrun(module, "straight", str(tmp_path))
    assert straight.returncode == 0, straight.stderr
    if module == "support.lightning_task":
        for file in tmp_path.glob("*.ckpt"):
            file.unlink()
    killed = torchrun(module, "killed", str(tmp_path))
    assert "SIGKILL" in killed.stderr
    resumed = torchrun(module, "resumed", str(tmp_path))
    assert resumed.returncode == 0, resumed.stderr
    ends = {}
    for rank in (0, 1):
        weights, rows, compared = torch.load(tmp_path / f"straight-{rank}.pt")
        again, new_rows, also = torch.load(tmp_path / f"resumed-{rank}.pt")
        assert all(map(torch.equal, weights, again))
        assert new_rows == {step: rows[step] for step in range(BEGIN, 400)}
        assert "lowered=False" in rows[BEGIN]
        assert "lowered=True" in rows[399]  # losses of both processes, before and after the kill
        assert "would end at" in rows[399]
        assert len(compared) == 7  # at steps 50, 100 … 350; the next one would be at step 402
        assert compared == also  # the loss at averaged parameters, on both processes
        ends[rank] = weights, rows, compared
    assert all(map(torch.equal, ends[0][0], ends[1][0]))
    assert ends[0][1:] == ends[1][1:]  # both processes came to the same decisions
