"""Processes that start at once: a server imports the library one time, and forks itself.

A function must be importable by name. `support` is; a test module is not.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

PRELOADED = [
    "equilibrate_paper.cli",
    "sklearn.datasets",
    "support.checkpointed",
    "support.sharded",
    "torch._dynamo",  # FSDP2 imports it when it is first used
]


def start(function: Callable[..., object], *args: Any) -> ForkServerProcess:
    """Call a function in a process of its own, with one thread for torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # the server has the environment of this moment
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def command_line(
    arguments: Sequence[str], output: Path, environment: dict[str, str] | None = None
) -> None:
    """Run `equilibrate-paper` with its output in a file, warnings being errors. For `start`."""
    from equilibrate_paper.cli import run

    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({"COLUMNS": "160", **(environment or {})})
    warnings.simplefilter("error")
    sys.argv = ["equilibrate-paper", *arguments]
    run()
