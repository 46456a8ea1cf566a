"""Run jobs as processes, some at a time, until a deadline; each process makes one run.

A run leaves a record or nothing, so killing one process, or all of them, loses unfinished runs only
and the next call makes them again. Processes are forked from a server that has imported torch and
has not touched the GPU, which saves seconds for each run.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

GRACE = 20.0
"""Seconds after the deadline at which runs that are not done are ended."""


@dataclass(frozen=True)
class Work:
    """A function to call in a process of its own."""

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
    running: dict[str, BaseProcess] = {}
    finished: list[str] = []
    failed: list[str] = []
    tried: set[str] = set()
    waiting = [work for work in remaining() if work.name not in tried]
    while True:
        ended = [name for name, process in running.items() if not process.is_alive()]
        for name in ended:
            process = running.pop(name)
            process.join()
            (failed if process.exitcode else finished).append(name)
        if ended:
            waiting = [work for work in remaining() if work.name not in tried]
        now = time.monotonic()
        for work in waiting:
            if len(running) >= workers:
                break
            if work.name not in tried and now + work.seconds <= end:
                tried.add(work.name)
                process = context.Process(target=work.function, args=work.arguments, daemon=True)
                process.start()
                running[work.name] = process
        if not running:
            break
        if now > end + GRACE:
            for process in running.values():
                process.kill()
        if now > ticked + 60:
            ticked = now
            print(
                f"{(now - began) / 60:.1f} min: {len(finished)} done, {len(running)} running, "
                f"{len(failed)} failed",
                flush=True,
            )
            tick()
        time.sleep(0.05)
    tick()
    return Outcome(tuple(finished), tuple(failed), time.monotonic() - began)
