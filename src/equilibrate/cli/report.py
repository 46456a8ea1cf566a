"""The command `equilibrate report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from equilibrate.report import run, run_page
from equilibrate.runlog import files
from equilibrate.runlog.runs import find_record


def report(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Folder of a run, or its record (a file that ends in .jsonl)."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write.", show_default="RUN/report.html"),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Title of the page.", show_default="name of the run")
    ] = None,
    replica: Annotated[
        int | None, typer.Option(help="Which replica to show, if the run is an ensemble.")
    ] = None,
) -> None:
    """Make an interactive HTML page from the record of a run.

    The page is one file that loads nothing. The run need not have ended.
    """
    record = find_record(path)
    html = run_page.render(run.load(record, title=title, replica=replica))
    if out is None:
        out = record.with_name("report.html") if path.is_dir() else record.with_suffix(".html")
    files.write(out, html)
    Console().print(f"report  {out}", highlight=False, soft_wrap=True)
