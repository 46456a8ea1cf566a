"""Checkpoints that are whole or not there: a kill while one is written leaves the one before."""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

_DAMAGE = (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError)


class CheckpointError(Exception):
    """No checkpoint that can be read, and what to do about it."""


def save(path: Path | str, state: dict[str, Any]) -> None:
    """Write `state` under `path`, keeping what was there as `path.previous`.

    The file is written beside, flushed to the disk, and only then given its name. What `torch.load`
    would refuse by default is refused here, before a run depends on it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.pt"
    >>> save(path, {"epoch": 1})
    >>> save(path, {"epoch": 2})
    >>> torch.load(path)
    {'epoch': 2}
    >>> load(path.with_name("run.pt.previous"))
    {'epoch': 1}
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(partial)
    if refused:
        partial.unlink()
        raise TypeError(
            f"state holds {', '.join(sorted(refused))}, which torch.load refuses by default: put "
            "tensors, numbers and strings into it, such as state_dict() and vars(arguments)"
        )
    if path.exists():
        os.replace(path, _previous(path))
    os.replace(partial, path)


def load(path: Path | str) -> dict[str, Any] | None:
    """The newest whole checkpoint under `path`, or None where there never was one.

    A damaged one is named in a warning and the one before it is used.
    """
    path = Path(path)
    candidates = [p for p in (path, _previous(path)) if p.exists()]
    damage = []
    for candidate in candidates:
        try:
            state = _read(candidate)
        except _DAMAGE as error:
            damage.append(f"{candidate} is damaged ({error})")
            continue
        if damage:
            warnings.warn(f"{'; '.join(damage)}: going on from {candidate}", stacklevel=2)
        return state
    if damage:
        raise CheckpointError(f"{'; '.join(damage)}: no earlier one is left, start the run again")
    return None


def remove(path: Path | str) -> None:
    """Take away what is under `path`, and the one before it."""
    for kept in (_previous(Path(path)), Path(path)):
        kept.unlink(missing_ok=True)


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def _read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums, zipfile does
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"checksum of {bad} is wrong")
    return torch.load(path, weights_only=True)
