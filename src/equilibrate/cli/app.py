"""The commands and their common options."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from equilibrate import __version__
from equilibrate.cli.report import report
from equilibrate.cli.watch import watch
from equilibrate.runlog.files import WriteError
from equilibrate.runlog.records import RecordError

app = typer.Typer(
    help="Show what a run recorded.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(report)
app.command()(watch)


def run() -> None:
    """Run the command line. Errors that the user can fix are shown without a traceback."""
    try:
        app()
    except (ValueError, RecordError, WriteError) as error:
        console = Console(stderr=True)
        console.print(f"equilibrate: {error}", style="red", highlight=False)
        sys.exit(2)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"equilibrate {__version__}")
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
