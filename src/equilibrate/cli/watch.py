"""The command `equilibrate watch`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from equilibrate.report.live import Follower
from equilibrate.runlog.runs import find_record


def watch(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, or its record (a file that ends in .jsonl). It may not exist "
            "yet.",
        ),
    ],
    interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two looks at the record.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the present state and exit.")] = False,
) -> None:
    """Show a run in the terminal while another process trains.

    It ends with the run, or with Ctrl-C. The training does not notice it.
    """
    console = Console()
    follower = Follower(find_record(path, missing_ok=not once))
    follower.poll()
    if not once:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(path, follower, console, interval)
    console.print(follower.view())


def _follow(path: Path, follower: Follower, console: Console, interval: float) -> None:
    """Look at the record until the run has ended, and show it if there is a terminal."""
    screen = Live(console=console, screen=True, auto_refresh=False)
    with screen if console.is_terminal else contextlib.nullcontext():
        while not follower.ended:
            if console.is_terminal:
                screen.update(follower.view(), refresh=True)
            time.sleep(interval)
            if follower.tail.header is None:  # the folder may have got its record by now
                follower.tail.path = find_record(path, missing_ok=True)
            follower.poll()
