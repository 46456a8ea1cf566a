"""Processes that hold a lock, write a record or train until they are killed."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

from equilibrate.runlog.lock import lock
from equilibrate.runlog.records import Writer
from equilibrate_paper.runs.training import Settings, train


def hold_lock(folder: Path, parent: Connection) -> None:
    """Lock a folder, say so, and keep it."""
    with lock(folder):
        parent.send("locked")
        time.sleep(600)


def write_rows(path: Path, parent: Connection) -> None:
    """Write rows without end, and report the number of each row that is written."""
    writer = Writer(path, config={})
    while True:
        writer.write({"k": writer.count, "pad": "x" * 3000})
        parent.send(writer.count - 1)


def record_run(folder: Path, epochs: int) -> None:
    """Train, or continue to train, with a row and a checkpoint after each epoch of two steps."""
    settings = Settings(epochs=epochs, batch_size=750, threshold=0.5)
    for _ in train(settings, folder, mode="resume"):
        pass
