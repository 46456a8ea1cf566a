"""Run a module of the tests on two processes, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def torchrun(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc-per-node 2 -m module …` and return what it wrote."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", module, *args]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
