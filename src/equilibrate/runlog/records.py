"""Append-only JSONL records that survive a kill at any moment (checkpoints are in `checkpoints`).

The first row tells what was run and where; each further row is one `write`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

import equilibrate
from equilibrate.runlog import provenance

Row = dict[str, Any]


class RecordError(Exception):
    """A record that cannot be made, written or read, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Records:
    """A finished or interrupted run as it stands in its file."""

    config: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row]


class Writer:
    """Writes rows to a JSONL file, each in one piece.

    `mode="new"` refuses to overwrite; `"overwrite"` starts the file again; `"resume"` goes on in
    it, if it was made with the same `config`, after its first `keep` rows (all by default), so that
    a run resumed from a checkpoint leaves the same file as one never stopped. A missing folder is
    made. Numbers that are not finite are written as null. A `with` that fails before the first row
    leaves no file.

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
        self.path = Path(path)
        if mode not in ("new", "resume", "overwrite"):
            raise ValueError(f"mode must be 'new', 'resume' or 'overwrite', got {mode!r}")
        if mode == "new" and self.path.exists():
            raise RecordError(
                f"{self.path} holds an earlier run: resume it, overwrite it, or choose another "
                "folder"
            )
        self._file = _open(self.path)
        self.count = 0
        try:
            if mode == "resume" and (keep or os.fstat(self._file).st_size):
                self._take_up(config, keep)
            else:
                os.ftruncate(self._file, 0)
                self._append({"config": config, "environment": environment()})
        except BaseException:
            self.close()
            raise

    def write(self, row: Row) -> None:
        """Append one row. Once this returns, killing the process does not lose it."""
        self._append(row)
        self.count += 1

    def sync(self) -> None:
        """Have the disk hold all rows, so that not even a power cut loses them."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is not None and not self.count:  # nothing that would have to be overwritten
            self.path.unlink()

    def _take_up(self, config: dict[str, Any], keep: int | None) -> None:
        data = self.path.read_bytes()
        lines = _whole_lines(data)
        written = json.loads(lines[0])["config"] if lines else None
        if data and written != _plain(config):
            raise RecordError(
                f"{self.path} was made with other settings ({_difference(written, config)}): "
                "give the same ones to resume, or overwrite it"
            )
        rows = max(0, len(lines) - 1)
        self.count = rows if keep is None else keep
        if rows < self.count:
            raise RecordError(
                f"{self.path} holds {rows} rows, the checkpoint counts {keep}: they do not belong "
                "together; overwrite the run"
            )
        end = sum(len(line) + 1 for line in lines[: 1 + self.count])
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)

    def _append(self, row: Row) -> None:
        data = _line(row)
        start = os.lseek(self._file, 0, os.SEEK_CUR)
        try:
            while data:  # a disk that fills up takes a part, and then says so
                data = data[os.write(self._file, data) :]
        except OSError as error:
            os.ftruncate(self._file, start)
            os.lseek(self._file, start, os.SEEK_SET)
            raise RecordError(
                f"cannot write to {self.path} ({error.strerror}); its {self.count} rows are safe: "
                "make room and resume"
            ) from error


def read(path: Path | str) -> Records:
    """Read a record file; a last row torn by a kill is left out."""
    path = Path(path)
    if not path.exists():
        raise RecordError(f"{path} does not exist: run the experiment first")
    lines = _whole_lines(path.read_bytes())
    try:
        header, *rows = [json.loads(line) for line in lines]
        return Records(header["config"], header["environment"], rows)
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path} is not a record of equilibrate ({type(error).__name__}: {error}): "
            "remove it and run again"
        ) from error


def environment() -> dict[str, Any]:
    """Where and with what a run was made."""
    return {
        "equilibrate": equilibrate.__version__,
        "commit": provenance.commit(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@contextlib.contextmanager
def lock(folder: Path | str) -> Iterator[None]:
    """Hold a folder for one run; a second is refused. A killed process lets go by itself."""
    file = _open(Path(folder) / ".lock")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise RecordError(
            f"another run is writing to {folder}: wait for it, or choose another folder"
        ) from error
    try:
        yield
    finally:
        os.close(file)


def _open(path: Path) -> int:
    """Open for reading and writing, making the folder and file where they are missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RecordError(
            f"cannot write to {path} ({error.strerror}): choose a folder that can be written to"
        ) from error


def _whole_lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")[:-1]


def _line(row: Row) -> bytes:
    try:
        return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except TypeError as error:
        kinds = ", ".join(f"{key!r} ({type(value).__name__})" for key, value in row.items())
        raise TypeError(
            f"a row cannot be written as JSON ({error}); it has {kinds}: pass numbers and strings, "
            "such as loss.item() and str(path)"
        ) from error


def _plain(value: Any) -> Any:
    """JSON's own types; null for what is not a finite number."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _difference(written: dict[str, Any] | None, config: dict[str, Any]) -> str:
    if written is None:
        return "no whole header"
    now = _plain(config)
    keys = [k for k in {**written, **now} if written.get(k) != now.get(k)]
    return ", ".join(f"{k}: {written.get(k)!r} there, {now.get(k)!r} here" for k in keys)
