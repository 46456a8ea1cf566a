"""A few processes that run functions together, each time in a process group of their own."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from support import forks

TIMEOUT = 120
"""Seconds after which a collective that not all processes have called fails."""


class Processes:
    """Starts processes when they are first needed, and keeps them. See `forks` for functions."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._workers: list[tuple[ForkServerProcess, Connection]] = []

    def run(self, function, *args, size=None):
        """Call function(*args) in `size` processes of one group, and return all results."""
        if not self._workers:
            self._start()
        size = size or self._most
        workers = self._workers[:size]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, connection) in enumerate(workers):
                connection.send((function, args, rank, size, Path(folder, "store")))
            pending = {connection: rank for rank, (_, connection) in enumerate(workers)}
            results = [None] * size
            while pending:
                for connection in wait(list(pending)):
                    rank = pending.pop(connection)
                    results[rank], error = connection.recv()
                    if error:
                        self.stop()  # the others may wait for it for ever
                        raise AssertionError(f"rank {rank} of {size}:\n{error}")
        return results

    def stop(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []

    def _start(self) -> None:
        for _ in range(self._most):
            here, there = Pipe()
            process = forks.start(_serve, there)
            there.close()
            self._workers.append((process, here))


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("error", module="equilibrate")
    warnings.filterwarnings("ignore", message="Deallocating Tensor")  # FSDP1 of torch 2.8
    while True:
        try:
            function, args, rank, size, store = connection.recv()
        except EOFError:
            return
        result = error = None
        try:
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=TIMEOUT),
            )
            result = function(*args)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            error = traceback.format_exc()
        connection.send((result, error))
