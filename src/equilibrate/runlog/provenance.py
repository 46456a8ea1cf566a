"""Which commit this copy of the library is made of, for the records."""

from __future__ import annotations

import subprocess
from pathlib import Path

_ARCHIVED = "$Format:%H$"  # `git archive` writes the commit here, as .gitattributes tells it to


def commit() -> str | None:
    """The commit of the library's code, with "+" where it was changed since; None if unknown.

    It is known to a checkout and to an archive of one, not to an installed wheel.
    """
    if not _ARCHIVED.startswith("$"):
        return _ARCHIVED
    try:
        # A virtual environment may lie in somebody else's repository.
        _git("ls-files", "--error-unmatch", __file__)
        return _git("rev-parse", "HEAD") + "+" * bool(_git("status", "--short", "."))
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()
