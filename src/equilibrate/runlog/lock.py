"""Locks that let only one process write to a folder or to a record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from equilibrate.runlog.records import RecordError


@contextlib.contextmanager
def lock(folder: Path | str) -> Iterator[None]:
    """Lock `folder` against other processes while the `with` block runs.

    The folder is created if it is missing. The operating system releases the lock of a killed
    process. The file `.lock` stays in the folder after the lock is released.

    Args:
        folder: The folder to lock.

    Yields:
        Nothing; the lock is held inside the block.
    """
    file_lock = _acquire(Path(folder) / ".lock", folder, timeout=0)
    try:
        yield
    finally:
        file_lock.release()


def lock_record(path: Path | str, *, timeout: float = 10.0) -> FileLock:
    """Lock one record, so that several may be written in the same folder.

    Args:
        path: The record, such as `runs/mine/train.jsonl`. The lock is `.train.jsonl.lock` next to
            it, and stays there.
        timeout: Seconds to wait for another process to release it. Forked workers of a data loader
            outlive a killed process by a few seconds, and its lock with them.

    Returns:
        The lock; call its method `release`.
    """
    path = Path(path)
    return _acquire(path.with_name(f".{path.name}.lock"), path, timeout)


def _acquire(path: Path, locked: Path | str, timeout: float) -> FileLock:
    """Return a lock that is held.

    Raises:
        RecordError: If another process holds the lock, or the folder cannot be written to.
    """
    file_lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file_lock.acquire(timeout=timeout)
    except Timeout as error:
        raise RecordError(
            f"another run is writing to {locked}: wait for it to end, or choose another folder"
        ) from error
    except OSError as error:
        raise RecordError(
            f"cannot write to {path} ({error.strerror}): choose a folder you can write to"
        ) from error
    return file_lock
