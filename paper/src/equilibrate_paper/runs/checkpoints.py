"""Checkpoints that are complete or absent: a kill during saving leaves the previous one intact."""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from equilibrate.runlog.files import WriteError, replacing

_READ_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read. The message says what to do."""


def save(path: Path | str, state: dict[str, Any]) -> None:
    """Save `state` to `path` and keep the checkpoint before it as `path.previous`.

    The state is written to a temporary file, flushed to the disk and then renamed, so that `path`
    is complete at any moment. If the disk is full, both checkpoints stay as they were.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.pt"
    >>> save(path, {"epoch": 1})
    >>> save(path, {"epoch": 2})
    >>> torch.load(path)
    {'epoch': 2}
    >>> load(path.with_name("run.pt.previous"))
    {'epoch': 1}

    Args:
        path: The file to write. Missing folders are created.
        state: Tensors, numbers, strings, and lists and dicts of them.

    Raises:
        TypeError: If `state` contains objects that `torch.load` does not load by default.
        CheckpointError: If it cannot be written.
    """
    path = Path(path)
    try:
        with replacing(path) as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file.name)
            if unsafe:
                raise TypeError(
                    f"state contains {', '.join(sorted(unsafe))}, which torch.load does not load "
                    "by default: use tensors, numbers and strings, such as state_dict() and "
                    "vars(arguments)"
                )
            if path.exists():  # until the block ends, the previous checkpoint is the newest
                os.replace(path, _previous(path))
    except WriteError as error:
        raise CheckpointError(f"{error}. Checkpoints before it are safe") from error


def load(path: Path | str) -> dict[str, Any] | None:
    """Load the newest intact checkpoint of `path`.

    If the newest is damaged, a warning names it and the previous one is loaded.

    Args:
        path: The path that was given to `save`.

    Returns:
        The saved state, or None if there is no checkpoint.

    Raises:
        CheckpointError: If there are checkpoints but all of them are damaged.
    """
    path = Path(path)
    candidates = [p for p in (path, _previous(path)) if p.exists()]
    damage = []
    for candidate in candidates:
        try:
            state = _read(candidate)
        except _READ_ERRORS as error:
            damage.append(f"{candidate} is damaged ({error})")
            continue
        if damage:
            warnings.warn(f"{'; '.join(damage)}: using {candidate} instead", stacklevel=2)
        return state
    if damage:
        raise CheckpointError(f"{'; '.join(damage)}: no intact checkpoint is left, restart the run")
    return None


def remove(path: Path | str) -> None:
    """Remove the checkpoint `path` and the previous one, if they exist.

    Args:
        path: The path that was given to `save`.
    """
    for file in (_previous(Path(path)), Path(path)):
        file.unlink(missing_ok=True)


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def _read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:  # torch does not verify the checksums, zipfile does
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"wrong checksum of {damaged}")
    return torch.load(path, weights_only=True)
