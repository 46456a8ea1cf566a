"""The command line: `equilibrate …` or `python -m equilibrate …`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line.

    The commands need the optional dependencies, which are imported only here. Without them, one
    line says how to install them.

    Raises:
        ModuleNotFoundError: If a module of equilibrate itself is missing.
    """
    try:
        from equilibrate.cli.app import run
    except ModuleNotFoundError as error:
        package = (error.name or "equilibrate").partition(".")[0]
        if package == "equilibrate":
            raise
        sys.exit(
            f"equilibrate: the command line needs {package}, which is not installed. Install it "
            "with: pip install 'equilibrate[cli]'"
        )
    run()
