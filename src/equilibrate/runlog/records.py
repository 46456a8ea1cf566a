"""Append-only JSONL records that survive a kill at any moment.

The first line of a file is its header: the configuration and the environment of the run. Each
further line is one row. A run that has ended may say so in a last line that is not a row.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from equilibrate.runlog import files, provenance

Row = dict[str, Any]
_REMOVE = "remove it and run again"


class RecordError(Exception):
    """A record that cannot be created, written or read. The message says how to fix it."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a record file."""

    config: dict[str, Any]
    """The settings of the run."""
    environment: dict[str, Any]
    """The versions, machine and time of the run; see `provenance.environment`."""


@dataclass(frozen=True, slots=True)
class End:
    """The last line of the record of a run that has ended."""

    status: str
    """How it ended, such as "finished" or "failed: out of memory"."""
    time: str
    """When, in ISO format."""


@dataclass(frozen=True, slots=True)
class Records(Header):
    """The contents of a record file, of a finished or an interrupted run."""

    rows: list[Row]
    """The rows in the order in which they were written."""
    end: End | None = None
    """How the run ended; None if it is running, was killed, or did not record it."""


class Writer:
    """Writes rows to a JSONL file.

    Numbers that are not finite are written as null. If a `with` block fails before the first row
    is written, the file is removed.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run" / "train.jsonl"
    >>> with Writer(path, config={"lr": 0.1}) as writer:
    ...     writer.write({"epoch": 1, "loss": 0.5})
    >>> read(path).rows
    [{'epoch': 1, 'loss': 0.5}]

    Args:
        path: The file to write. Missing folders are created.
        config: The settings of the run, stored in the header.
        mode: `"new"` raises an error if the file exists. `"overwrite"` replaces it. `"resume"`
            continues it if it has the same `config`, and creates it if it is missing.
        keep: Number of rows to keep when resuming; later rows are removed. The default keeps all.
            With the number of rows at the last checkpoint, a resumed run writes the same file as
            an uninterrupted one.
        may_change: Settings that may differ when resuming, such as the number of epochs. The header
            is then rewritten with the new ones.

    Raises:
        ValueError: If `mode` is not one of the above.
        RecordError: If the file exists in mode `"new"`, was written with another `config`, has
            fewer than `keep` rows, or cannot be written.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        config: dict[str, Any],
        mode: Literal["new", "resume", "overwrite"] = "new",
        keep: int | None = None,
        may_change: Collection[str] = (),
    ) -> None:
        self.path = Path(path)
        self.count = 0
        """Number of rows in the file."""
        if mode not in ("new", "resume", "overwrite"):
            raise ValueError(f"mode must be 'new', 'resume' or 'overwrite', got {mode!r}")
        if mode == "new" and self.path.exists():
            raise RecordError(
                f"{self.path} already exists: resume it (mode='resume', or --resume on the command "
                "line), overwrite it (mode='overwrite', --overwrite), or choose another folder"
            )
        existed = self.path.exists()
        self._file = _open(self.path)
        try:
            if mode == "resume" and (keep or self._file.tell()):
                self._resume(config, keep, may_change)
            else:
                self._file.truncate(0)
                self._append({"config": config, "environment": provenance.environment()})
        except BaseException:
            self.close()
            if not existed:
                self.path.unlink()
            raise

    def write(self, row: Row) -> None:
        """Append one row. Once this returns, killing the process does not lose the row.

        A row that is not JSON raises a TypeError, a full disk a `RecordError`. In both cases the
        rows before it stay intact.

        Args:
            row: A dict of numbers, strings, lists and dicts.
        """
        self._append(row)
        self.count += 1

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
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is not None and not self.count:  # an empty record would only have to be overwritten
            self.path.unlink()

    def _resume(
        self, config: dict[str, Any], keep: int | None, may_change: Collection[str]
    ) -> None:
        # Check that the file belongs to this run, and remove the rows after the first `keep`.
        data = self.path.read_bytes()
        lines, _ = split_end(_complete_lines(data))
        header = parse_header(self.path, lines[0]) if lines else None
        if data and (different := _difference(header and header.config, config, may_change)):
            raise RecordError(
                f"{self.path} was written with other settings ({different}): resume with the same "
                "settings, or overwrite it"
            )
        rows = max(0, len(lines) - 1)
        self.count = rows if keep is None else keep
        if rows < self.count:
            raise RecordError(
                f"{self.path} has {rows} rows, but the checkpoint was saved after {keep} rows: "
                "they belong to different runs; overwrite the run"
            )
        for number, line in enumerate(lines[1 : 1 + self.count], 2):
            parse_row(self.path, number, line)
        self._file.truncate(sum(len(line) + 1 for line in lines[: 1 + self.count]))
        if header is not None and header.config != _to_json(config):
            self._replace_header(config, header.environment, lines[1 : 1 + self.count])

    def _replace_header(
        self, config: dict[str, Any], environment: dict[str, Any], rows: list[bytes]
    ) -> None:
        header = _encode({"config": config, "environment": environment})
        try:
            files.write(self.path, header + b"".join(row + b"\n" for row in rows))
        except files.WriteError as error:
            raise RecordError(f"{error}. Its {self.count} rows are safe") from error
        self._file.close()
        self._file = _open(self.path)

    def _append(self, row: Row) -> None:
        data = _encode(row)
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


def read(path: Path | str) -> Records:
    """Read a record file. A last row that is incomplete because of a kill is ignored.

    A file that does not exist or is not a record raises a `RecordError`.

    Args:
        path: The file to read.

    Returns:
        Its header and its rows.
    """
    lines, end = split_end(_complete_lines(_existing(path).read_bytes()))
    first, *rest = lines or [b""]
    header = parse_header(path, first)
    rows = [parse_row(path, number, line) for number, line in enumerate(rest, 2)]
    return Records(header.config, header.environment, rows, end)


def read_header(path: Path | str) -> Header:
    """Read the header of a record file without reading its rows.

    A file that does not exist or is not a record raises a `RecordError`.

    Args:
        path: The file to read.

    Returns:
        The configuration and the environment of the run.
    """
    with open(_existing(path), "rb") as file:
        line = file.readline()
    return parse_header(path, line)


def split_end(lines: list[bytes]) -> tuple[list[bytes], End | None]:
    """Split the last line of a record off, if it says how the run ended.

    >>> split_end([b'{"epoch": 1}'])
    ([b'{"epoch": 1}'], None)

    Args:
        lines: Complete lines.

    Returns:
        The header and the rows, and how the run ended.
    """
    if not (lines and lines[-1].startswith(b'{"end": {"status": ')):
        return lines, None
    return lines[:-1], End(**json.loads(lines[-1])["end"])


def _existing(path: Path | str) -> Path:
    path = Path(path)
    if not path.exists():
        raise RecordError(f"{path} does not exist: run the experiment first")
    return path


def parse_header(path: Path | str, line: bytes) -> Header:
    """Return the header of a record.

    Args:
        path: The record, for the error message.
        line: Its first line.

    Returns:
        The header.

    Raises:
        RecordError: If the line is not a header.
    """
    try:
        header = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{path} is not a record of equilibrate ({error}): {_REMOVE}") from error
    if not (isinstance(header, dict) and {"config", "environment"} <= header.keys()):
        raise RecordError(
            f"{path} is not a record of equilibrate (its first line has no config and "
            f"environment): {_REMOVE}"
        )
    return Header(header["config"], header["environment"])


def parse_row(path: Path | str, number: int, line: bytes) -> Row:
    """Return the row of a line.

    Args:
        path: The record, for the error message.
        number: Number of the line, the header being line 1.
        line: The line.

    Returns:
        The row.

    Raises:
        RecordError: If the line is damaged.
    """
    cause, row = None, None
    try:
        row = json.loads(line)
        why = f"{type(row).__name__} instead of an object"
    except ValueError as error:
        cause, why = error, str(error)
    if isinstance(row, dict):
        return row
    raise RecordError(
        f"{path} is damaged in line {number} ({why}): restore it from a copy, or {_REMOVE}"
    ) from cause


def _open(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "ab", buffering=0)  # a row is in the file when write() returns
    except OSError as error:
        raise RecordError(
            f"cannot write to {path} ({error.strerror}): choose a folder you can write to"
        ) from error


def _complete_lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")[:-1]


def _encode(row: Row) -> bytes:
    try:
        return json.dumps(_to_json(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except TypeError as error:
        types = ", ".join(f"{key!r} ({type(value).__name__})" for key, value in row.items())
        raise TypeError(
            f"the row cannot be written as JSON ({error}); it has {types}: pass numbers and "
            "strings, such as loss.item() and str(path)"
        ) from error


def _to_json(value: Any) -> Any:
    """Return JSON's own types, with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(k): _to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _difference(
    written: dict[str, Any] | None, config: dict[str, Any], may_change: Collection[str]
) -> str:
    if written is None:
        return "its header is incomplete"
    now = _to_json(config)
    keys = [k for k in {**written, **now} if written.get(k) != now.get(k) and k not in may_change]
    return ", ".join(f"{k}: {written.get(k)!r} in the file, {now.get(k)!r} now" for k in keys)
