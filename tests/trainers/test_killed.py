"""A training on two processes (DDP, gloo) that is killed and resumed is the uninterrupted one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent.parent


def torchrun(module, *args):
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", module, *args]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "begin"), [("support.lightning_task", 240), ("support.hf_task", 240)]
)
def test_a_killed_run_resumes_under_ddp(module, begin, tmp_path):
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
        weights, rows = torch.load(tmp_path / f"straight-{rank}.pt")
        again, new_rows = torch.load(tmp_path / f"resumed-{rank}.pt")
        assert all(map(torch.equal, weights, again))
        assert new_rows == {step: rows[step] for step in range(begin, 400)}
        assert sum("lowered=True" in rows[step] for step in range(40, begin)) > 0
        assert sum("lowered=True" in rows[step] for step in range(begin + 1, 400)) > 0
        ends[rank] = weights, rows
    assert all(map(torch.equal, ends[0][0], ends[1][0]))
    assert ends[0][1] == ends[1][1]  # both processes came to the same decisions
