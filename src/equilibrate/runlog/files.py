"""Files that are complete or absent: written under another name, and then renamed."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


class WriteError(Exception):
    """A file that cannot be written. The message says how to fix it.

    Args:
        path: The file.
        error: The error of the operating system.
    """

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"cannot write to {path} ({error.strerror or error}): free some space, or choose a "
            "folder you can write to"
        )


@contextmanager
def replacing(path: Path | str) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the `with` block ends without an error.

    The content is written to `path.partial` next to it, flushed to the disk and renamed. After an
    error, such as a full disk, this file is removed and `path` is as it was before. Missing folders
    are created.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "new" / "text.txt"
    >>> with replacing(path) as file:
    ...     _ = file.write(b"hello")
    >>> path.read_text()
    'hello'

    Args:
        path: The file to write.

    Yields:
        The file, opened in binary mode.

    Raises:
        WriteError: If the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    raw: _RawFile | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = _RawFile(partial, "wb")
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise WriteError(path, error) from error
    except Exception as error:  # torch.save hides the error of the operating system in its own
        if raw is None or raw.error is None:
            raise
        raise WriteError(path, raw.error) from error
    finally:
        with suppress(OSError):
            partial.unlink()


def write(path: Path | str, content: str | bytes) -> Path:
    """Write a whole file, as `replacing` does.

    Args:
        path: The file to write.
        content: Its content; text is encoded as UTF-8.

    Returns:
        The path.
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return Path(path)


class _RawFile(io.FileIO):
    """A file that remembers why it could not be written."""

    error: OSError | None = None

    def write(self, b: Any, /) -> int | None:
        try:
            return super().write(b)
        except OSError as error:
            self.error = error
            raise
