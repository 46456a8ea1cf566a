"""Where a reproduction keeps its files."""

from __future__ import annotations

from pathlib import Path


def record_path(folder: Path | str, name: str) -> Path:
    """Return the path of the record of a run.

    Args:
        folder: The folder of the reproduction.
        name: The name of the run.
    """
    return Path(folder) / "records" / f"{name}.jsonl"


def part_paths(folder: Path | str, name: str) -> list[Path]:
    """Return the paths of the records of all parts of a run.

    Args:
        folder: The folder of the reproduction.
        name: The name of the whole run.
    """
    return sorted((Path(folder) / "records").glob(f"{name}.*.jsonl"))


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
