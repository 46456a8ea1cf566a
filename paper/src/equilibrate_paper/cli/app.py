"""The commands and their common options."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from equilibrate import __version__
from equilibrate.runlog.files import WriteError
from equilibrate.runlog.records import RecordError
from equilibrate_paper.cli.reproduce import reproduce
from equilibrate_paper.cli.train import train
from equilibrate_paper.data.datasets import DataError
from equilibrate_paper.runs.checkpoints import CheckpointError

app = typer.Typer(
    help="Reproduce the paper's figures and claims, or train with its schedule.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(reproduce)


def run() -> None:
    """Run the command line. Errors that the user can fix are shown without a traceback."""
    try:
        app()
    except (ValueError, RecordError, CheckpointError, DataError, WriteError) as error:
        # Under torchrun, rank 0 knows the errors of all ranks.
        console = Console(stderr=True, quiet=int(os.environ.get("RANK", "0")) > 0)
        console.print(f"equilibrate-paper: {error}", style="red", highlight=False)
        sys.exit(2)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"equilibrate-paper {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    return
