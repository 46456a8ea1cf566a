"""The command `equilibrate reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from equilibrate_paper.analysis import verdicts
from equilibrate_paper.cli.device import DeviceOption, parse_device
from equilibrate_paper.cli.interrupt import exit_if_unfinished, interrupt_message
from equilibrate_paper.output import terminal
from equilibrate_paper.protocol.panels import PANELS
from equilibrate_paper.runs import reproduce as reproduction
from equilibrate_paper.runs.outputs import drawn_panels, recorded_timings
from equilibrate_paper.runs.ranks import connect


def reproduce(
    panels: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIGURE", help=f"Any of {', '.join(PANELS)}; all by default."),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(help="quick (digits, minutes), or paper (MNIST and CIFAR-10, full size)."),
    ] = "quick",
    device: DeviceOption = "auto",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the official files of MNIST and CIFAR-10.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for all results.", show_default="runs/reproduce-PROFILE"),
    ] = None,
    epochs_scale: Annotated[
        float, typer.Option(help="Fraction of the epochs to run, in (0, 1].")
    ] = 1.0,
    seeds: Annotated[
        int | None, typer.Option(help="Maximum number of seeds.", show_default="all")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="RUN:FIRST-LAST",
            help="Execute only these seeds of one run, such as cnn-sequence:100-107. Parts from "
            "several machines are joined when they are in the same folder.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start all runs again.")] = False,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Draw what is recorded without running anything.")
    ] = False,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            help="Stop the runs after this time and exit with code 3. The next call continues "
            "them. Drawing, after the last run, takes up to a minute more.",
            show_default="no limit",
        ),
    ] = None,
) -> None:
    """Run the experiments of the paper, draw its figures and check its claims.

    An interrupted command continues when it is run again. With --max-minutes it stops by itself,
    so that a long reproduction can be made in several calls.

    To use several GPUs or CPU cores, start it with torchrun: `torchrun --nproc-per-node 4 -m
    equilibrate reproduce …`. Each process executes some of the seeds of each run.
    """
    console = Console()
    out = out or Path("runs") / f"reproduce-{profile}"
    change = " without --overwrite" if overwrite else ""
    hint = f"Run the same command again{change} to continue."
    with (
        connect() as ranks,
        interrupt_message(console, hint),
        exit_if_unfinished(console, hint, quiet=ranks.rank > 0),
    ):
        name = "cpu" if draw_only else device
        devices = ranks.together(lambda: str(parse_device(name, ranks)))
        claims = reproduction.reproduce(
            panels or (),
            profile=profile,
            device=devices[ranks.rank],
            data_dir=data_dir,
            out=out,
            epochs_scale=epochs_scale,
            seeds=seeds,
            part=part,
            overwrite=overwrite,
            draw_only=draw_only,
            max_minutes=max_minutes,
            console=console,
            ranks=ranks,
        )
        if ranks.rank > 0:
            return
    for table in terminal.claim_tables(verdicts.grouped(claims, panels or drawn_panels(out))):
        console.print(table)
    for name in ("records", "figures", "claims.json", "tables.md", "report.html"):
        console.print(f"{name:<12} {out / name}", highlight=False, soft_wrap=True)
    if timings := recorded_timings(out):
        console.print(f"{'run time':<12} {terminal.run_time(timings)}", highlight=False)
