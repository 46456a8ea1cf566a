"""Run jobs in processes, some at a time, until a deadline.

A run leaves a record or nothing, so killing one process, or all of them, loses unfinished runs only
and the next call makes them again. A process makes one run after another, which saves the seconds
that a GPU takes to start; one that fails or dies is replaced. Processes are forked from a server
that has imported torch and has not touched the GPU.
"""

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

GRACE = 20.0
"""Seconds after the deadline at which runs that are not done are ended."""


@dataclass(frozen=True)
class Work:
    """A function to call in another process."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    seconds: float = 0.0
    """Time that it will take, as far as known."""


@dataclass(frozen=True)
class Outcome:
    """What came of a call."""

    finished: tuple[str, ...]
    failed: tuple[str, ...]
    """Ended with an error, were killed, or were ended after the deadline."""
    seconds: float
    """Time that the call took."""


class _Worker:
    """A process that does what it is sent, one thing at a time."""

    def __init__(self, context: ForkServerContext) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process ends the pipe
        self.name: str | None = None
        """Name of what it does; None if it waits."""

    def start(self, work: Work) -> None:
        self.name = work.name
        self._pipe.send((work.function, work.arguments))

    def succeeded(self) -> bool | None:
        """Return whether the work succeeded; None if it is not done."""
        if not self._pipe.poll():
            return None
        try:
            self._pipe.recv()
        except (EOFError, ConnectionResetError):  # it ended with an error, or was killed
            return False
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection) -> None:
    # An error ends the process: after some of them a GPU fails in everything that follows.
    while True:
        function, arguments = pipe.recv()
        function(*arguments)
        gc.collect()  # a run's memory on the GPU, before the next one
        pipe.send(None)


def work_off(
    remaining: Callable[[], Sequence[Work]],
    workers: int,
    seconds: float,
    tick: Callable[[], None] = lambda: None,
    preload: Sequence[str] = ("training_study.runs",),
) -> Outcome:
    """Run what remains, in order, and start nothing that would end after the deadline.

    Args:
        remaining: Returns what can be started now and is not done, in order. It is asked again
            after each run, since some runs depend on others.
        workers: Processes at a time.
        seconds: The deadline, from now on.
        tick: Called about every minute and at the end.
        preload: Modules that the server imports.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # for preload
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    began = ticked = time.monotonic()
    end = began + seconds
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    finished: list[str] = []
    failed: list[str] = []
    tried: set[str] = set()
    waiting = list(remaining())
    try:
        while True:
            ended = {w: done for w in busy if (done := w.succeeded()) is not None}
            for worker, succeeded in ended.items():
                busy.remove(worker)
                (finished if succeeded else failed).append(str(worker.name))
                if succeeded:
                    idle.append(worker)
                else:
                    worker.kill()
            if ended:
                waiting = [work for work in remaining() if work.name not in tried]
            now = time.monotonic()
            for work in waiting:
                if len(busy) >= workers:
                    break
                if work.name not in tried and now + work.seconds <= end:
                    tried.add(work.name)
                    worker = idle.pop() if idle else _Worker(context)
                    worker.start(work)
                    busy.append(worker)
            if not busy:
                break
            if now > end + GRACE:
                for worker in busy:
                    worker.kill()
            if now > ticked + 60:
                ticked = now
                print(
                    f"{(now - began) / 60:.1f} min: {len(finished)} done, {len(busy)} running, "
                    f"{len(failed)} failed",
                    flush=True,
                )
                tick()
            time.sleep(0.02)
    finally:
        for worker in busy + idle:
            worker.kill()
    tick()
    return Outcome(tuple(finished), tuple(failed), time.monotonic() - began)
