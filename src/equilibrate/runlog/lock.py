"""A lock that lets only one process write to a folder."""

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

    Raises:
        RecordError: If another process holds the lock, or the folder cannot be written to.
    """
    path = Path(folder) / ".lock"
    file_lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file_lock.acquire(timeout=0)
    except Timeout as error:
        raise RecordError(
            f"another run is writing to {folder}: wait for it to end, or choose another folder"
        ) from error
    except OSError as error:
        raise RecordError(
            f"cannot write to {path} ({error.strerror}): choose a folder you can write to"
        ) from error
    try:
        yield
    finally:
        file_lock.release()
