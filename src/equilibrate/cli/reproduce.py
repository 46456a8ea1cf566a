"""The command `equilibrate reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from equilibrate.cli.device import DeviceOption, parse_device
from equilibrate.cli.interrupt import interrupt_message
from equilibrate.paper.analysis import verdicts
from equilibrate.paper.output import terminal
from equilibrate.paper.protocol.panels import PANELS
from equilibrate.paper.runs import reproduce as reproduction
from equilibrate.paper.runs.outputs import drawn_panels
from equilibrate.paper.runs.ranks import connect


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
) -> None:
    """Run the experiments of the paper, draw its figures and check its claims.

    An interrupted command continues when it is run again.

    To use several GPUs or CPU cores, start it with torchrun: `torchrun --nproc-per-node 4 -m
    equilibrate reproduce …`. Each process executes some of the seeds of each run.
    """
    console = Console()
    out = out or Path("runs") / f"reproduce-{profile}"
    change = " without --overwrite" if overwrite else ""
    with (
        connect() as ranks,
        interrupt_message(console, f"Run the same command again{change} to continue."),
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
            console=console,
            ranks=ranks,
        )
        if ranks.rank > 0:
            return
    for table in terminal.claim_tables(verdicts.grouped(claims, panels or drawn_panels(out))):
        console.print(table)
    for name in ("records", "figures", "claims.json", "tables.md", "report.html"):
        console.print(f"{name:<12} {out / name}", highlight=False, soft_wrap=True)
