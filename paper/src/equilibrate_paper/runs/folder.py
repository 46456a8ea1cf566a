"""Where a reproduction keeps its files, and checkpoints that are complete or absent."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from equilibrate.record import jsonl
from equilibrate_paper.runs.errors import RunError


def record_path(folder: Path | str, name: str) -> Path:
    """Return the path of the record of a run.

    Args:
        folder: The folder of the reproduction.
        name: The name of the run.
    """
    return Path(folder) / "records" / f"{name}.jsonl"


def checkpoint_path(folder: Path | str, name: str) -> Path:
    """Return the path of the checkpoint of a run.

    Args:
        folder: The folder of the reproduction.
        name: The name of the run.
    """
    return Path(folder) / "checkpoints" / f"{name}.pt"


def figure_path(folder: Path | str, panel: str) -> Path:
    """Return the path of the SVG file of a panel.

    Args:
        folder: The folder of the reproduction.
        panel: The id of the panel.
    """
    return Path(folder) / "figures" / f"fig{panel}.svg"


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint. A kill or a full disk leaves the one before it as it was.

    Args:
        path: The file.
        state: Tensors, numbers, strings, and lists and dicts of them.
    """
    content = io.BytesIO()
    torch.save(state, content)
    jsonl.write_file(path, content.getvalue())


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Load a checkpoint.

    Args:
        path: The file.

    Returns:
        The saved state, or None if there is no checkpoint.

    Raises:
        RunError: If the file is damaged.
    """
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RunError(f"{path} is damaged ({error}): overwrite the run") from error
