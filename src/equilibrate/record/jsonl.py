"""Records of runs: JSON-lines files that lose nothing when the process is killed.

The first line of a file is its header: the configuration and the environment of the run. Each
further line is one row. A run that has ended says so in a last line, `{"end": …}`.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from equilibrate.record import provenance

Row = dict[str, Any]
_WAIT_SECONDS = 10.0
"""Forked workers of a data loader keep the lock of a killed process for a few seconds."""
_RETRY_SECONDS = 0.1
_HEADER = ("config", "environment")
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
"""It reads NaN and Infinity, which are not JSON, as null."""


class RecordError(Exception):
    """A file that cannot be written or read. The message says how to fix it."""


@dataclass(frozen=True, slots=True)
class Record:
    """The contents of a record, of a finished or an interrupted run."""

    config: dict[str, Any]
    """The settings of the run."""
    environment: dict[str, Any]
    """The versions, machine and time of the run; see `provenance.environment`."""
    rows: list[Row]
    """The rows in the order in which they were written."""
    end: dict[str, str] | None = None
    """`status` and `time` of the end; None if the run continues or was killed."""


class Writer:
    """Appends rows to a record. No other process can write to it meanwhile.

    Numbers that are not finite, or too large for a double, are written as null.

    Args:
        path: The file. Missing folders are created.
        config: The settings of the run, for the header.
        mode: `"new"` raises an error if the file has rows. `"overwrite"` replaces them. `"resume"`
            continues the record, and creates it if it is missing.
        keep: Number of rows to keep when resuming. With the number of rows at the last checkpoint,
            a resumed run writes the same rows as an uninterrupted one. Default: all.

    Raises:
        ValueError: If `mode` is not one of the above.
        RecordError: If the file has rows in mode `"new"`, was written with another `config`, has
            fewer than `keep` rows, is not a record, or cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run" / "train.jsonl"
        >>> with Writer(path, config={"lr": 0.1}) as writer:
        ...     writer.write({"epoch": 1, "loss": 0.5})
        >>> read(path).rows
        [{'epoch': 1, 'loss': 0.5}]
    """

    def __init__(
        self,
        path: Path | str,
        *,
        config: dict[str, Any],
        mode: Literal["new", "resume", "overwrite"] = "new",
        keep: int | None = None,
    ) -> None:
        if mode not in ("new", "resume", "overwrite"):
            raise ValueError(f"mode must be 'new', 'resume' or 'overwrite', got {mode!r}")
        self.path = Path(path)
        self.count = 0
        """Number of rows in the file."""
        self._file = open_locked(self.path, wait=_WAIT_SECONDS)
        try:
            lines = iter(()) if mode == "overwrite" else read_lines(self.path)
            header = next(lines, None)
            if mode == "new" and next(lines, None):
                raise RecordError(
                    f"{self.path} already exists: resume it (mode='resume', or --resume on the "
                    "command line), overwrite it (mode='overwrite', --overwrite), or choose "
                    "another folder"
                )
            if mode == "resume" and header is not None:
                self._check_settings(header["config"], config)
                rows = (line for line in islice(lines, keep) if not is_end(line))
                self.truncate(sum(1 for _ in rows))
            if self.count < (keep or 0):
                raise RecordError(
                    f"{self.path} has {self.count} rows, but the checkpoint was saved after {keep} "
                    "rows: they belong to different runs; overwrite the run"
                )
            if mode != "resume" or header is None:
                self._file.truncate(0)
                self._append({"config": config, "environment": provenance.environment()})
        except BaseException:
            self.close()
            raise

    def write(self, row: Row) -> None:
        """Append a row. Once this returns, killing the process does not lose the row.

        A row that is not JSON raises a TypeError, a full disk a `RecordError`. In both cases the
        rows before it stay intact. `encode` tells whether a row is JSON.

        Args:
            row: A dict of numbers, strings, lists and dicts.
        """
        self._append(row)
        self.count += 1

    def truncate(self, count: int) -> None:
        """Remove all rows but the first ones, and the last line that says how the run ended.

        Args:
            count: How many rows to keep.
        """
        with open(self.path, "rb") as file:
            self._file.truncate(sum(map(len, islice(file, 1 + count))))
        self.count = count

    def end(self, status: str = "finished") -> None:
        """Append a last line that says how the run ended. It is not a row; resuming removes it.

        Args:
            status: How the run ended, such as "finished" or "failed: out of memory".
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._append({"end": {"status": status, "time": now}})

    def sync(self) -> None:
        """Flush all rows to the disk, so that they also survive a power failure."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, which other processes may write to from now on."""
        if not self._file.closed:
            with suppress(OSError):  # forked workers of a data loader may still have it open
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_settings(self, written: dict[str, Any], config: dict[str, Any]) -> None:
        if changed := differences(written, config):
            raise RecordError(
                f"{self.path} was written with other settings ({changed}): resume with the same "
                "settings, or overwrite it"
            )

    def _append(self, line: Row) -> None:
        data = encode(line)
        start = self._file.seek(0, os.SEEK_END)
        try:
            while data:  # a disk that is almost full accepts a part and fails at the next call
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.truncate(start)
            raise RecordError(
                f"cannot write to {self.path} ({error.strerror}); its {self.count} rows are safe: "
                "free some space and resume"
            ) from error


def read(path: Path | str) -> Record:
    """Read a record. A last row that is incomplete because of a kill is ignored.

    Args:
        path: The file.

    Returns:
        Its header, its rows and how the run ended.
    """
    header, *rows = read_lines(path, complete=True)
    end = rows.pop()["end"] if rows and is_end(rows[-1]) else None
    return Record(header["config"], header["environment"], rows, end)


def read_header(path: Path | str) -> Record:
    """Read the header of a record, but not its rows.

    Args:
        path: The file.

    Returns:
        The record without rows.
    """
    header = next(read_lines(path, complete=True))
    return Record(header["config"], header["environment"], [])


def read_lines(path: Path | str, *, complete: bool = False) -> Iterator[Row]:
    """Read a record line by line, without holding it in memory.

    Args:
        path: The file.
        complete: Whether a file without a complete header is an error. It has none if its process
            was killed at once.

    Yields:
        The header, a dict with `config` and `environment`; the rows; and how the run ended, a dict
        with `end` alone. A line that is not complete yet is left out.

    Raises:
        RecordError: If the file does not exist, is not a record, or is damaged.
    """
    number = 0
    try:
        with open(path, "rb") as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    number -= 1
                    break
                yield _parse(path, number, data)
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist: run the experiment first") from None
    if complete and number == 0:
        raise RecordError(f"{path} is empty: wait for the run to begin, or remove it")


def differences(written: dict[str, Any], config: dict[str, Any]) -> str:
    """Return which settings differ from those in the header of a record.

    Args:
        written: The settings in the header.
        config: The settings now.

    Returns:
        Names and values, for people to read; empty if there is no difference.
    """
    now = _to_json(config)
    names = [name for name in {**written, **now} if written.get(name) != now.get(name)]
    return ", ".join(f"{n}: {written.get(n)!r} in the file, {now.get(n)!r} now" for n in names)


def open_locked(path: Path | str, *, wait: float = 0.0) -> BinaryIO:
    """Open a file for appending that no other process may open like this until it is closed.

    The operating system releases the lock of a killed process.

    Args:
        path: The file. Missing folders are created.
        wait: Seconds to wait for another process.

    Returns:
        The file, without a buffer: what was written is in the file.

    Raises:
        RecordError: If another process has it, or it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise RecordError(
            f"cannot write to {path} ({error.strerror}): choose a folder you can write to"
        ) from error
    for _ in range(1 + round(wait / _RETRY_SECONDS)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(_RETRY_SECONDS)
        except OSError:  # this file system has no locks
            return file
    file.close()
    raise RecordError(
        f"another run is writing to {path}: wait for it to end, or choose another folder"
    )


def write_file(path: Path | str, content: str | bytes) -> Path:
    """Write a whole file. Until it is complete, the one before it stays.

    Args:
        path: The file. Missing folders are created.
        content: Its content; text is encoded as UTF-8, with a question mark for what is no text.

    Returns:
        The path.

    Raises:
        RecordError: If it cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise RecordError(f"cannot write to {path}, which is a folder: name a file in it")
    partial = path.with_name(path.name + ".partial")
    data = content.encode(errors="replace") if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise RecordError(
            f"cannot write to {path} ({error.strerror}): free some space, or choose a folder you "
            "can write to"
        ) from error
    return path


def _parse(path: Path | str, number: int, data: bytes) -> Row:
    cause, line = None, None
    try:
        line = _DECODER.decode(data.decode())
        why = f"{type(line).__name__} instead of an object"
    except (ValueError, RecursionError) as error:
        cause, why = error, str(error)
    header = [line.get(name) if isinstance(line, dict) else None for name in _HEADER]
    if number == 1 and not all(isinstance(part, dict) for part in header):
        raise RecordError(
            f"{path} is not a record of equilibrate: its first line has no config and environment"
        ) from cause
    if not isinstance(line, dict):
        raise RecordError(
            f"{path} is damaged in line {number} ({why}): restore it from a copy, or remove it and "
            "run again"
        ) from cause
    return line


def is_end(line: Row) -> bool:
    """Return whether a line says how the run ended."""
    return line.keys() == {"end"}


def encode(line: Row) -> bytes:
    """Return a line of a record. Characters that UTF-8 does not have are written as escapes.

    Args:
        line: A dict of numbers, strings, lists and dicts.

    Returns:
        The line, with its end.

    Raises:
        TypeError: If it cannot be written as JSON.
    """
    try:
        text = json.dumps(_to_json(line), ensure_ascii=False, allow_nan=False)
        return text.encode(errors="backslashreplace") + b"\n"
    except (TypeError, RecursionError) as error:
        types = ", ".join(f"{key!r} ({type(value).__name__})" for key, value in line.items())
        raise TypeError(
            f"the row cannot be written as JSON ({error}); it has {types}: pass numbers and "
            "strings, such as loss.item() and str(path)"
        ) from error


def _to_json(value: Any) -> Any:
    """Return JSON's own types, with None for numbers that are not finite, or no double."""
    if isinstance(value, dict):
        return {str(k): _to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(v) for v in value]
    if isinstance(value, int | float):
        return value if is_finite(value) else None
    return value


def is_finite(number: float) -> bool:
    """Return whether a number is finite, and not too large for a double.

    >>> is_finite(1e300), is_finite(float("nan")), is_finite(10**400)
    (True, False, False)
    """
    return abs(number) <= sys.float_info.max
