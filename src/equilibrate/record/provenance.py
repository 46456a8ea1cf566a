"""Which code, libraries and machine a run was made with."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

import equilibrate

_ARCHIVED = "$Format:%H$"  # `git archive` replaces this by the commit, see .gitattributes


def environment() -> dict[str, Any]:
    """Return the versions, machine and time of a run, for the header of its record."""
    return {
        "equilibrate": equilibrate.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """Return the git commit of the library's code.

    Returns:
        The commit hash, followed by "+" if the code has uncommitted changes. None if it is unknown,
        as in an installed wheel: only a git checkout and a `git archive` know their commit.
    """
    if not _ARCHIVED.startswith("$"):
        return _ARCHIVED
    try:
        # The library may be installed inside the repository of another project.
        _git("ls-files", "--error-unmatch", __file__)
        return _git("rev-parse", "HEAD") + "+" * bool(_git("status", "--short", "."))
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
