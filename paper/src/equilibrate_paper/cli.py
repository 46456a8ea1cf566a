"""The command line: `equilibrate-paper …` or `python -m equilibrate_paper …`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from equilibrate import cli as library
from equilibrate.record.jsonl import RecordError
from equilibrate_paper.analysis import verdicts
from equilibrate_paper.data.datasets import DataError
from equilibrate_paper.output import terminal
from equilibrate_paper.progress import progress_bars
from equilibrate_paper.protocol import profiles
from equilibrate_paper.protocol.panels import PANELS
from equilibrate_paper.runs import reproduce as reproduction
from equilibrate_paper.runs import training
from equilibrate_paper.runs.errors import Unfinished
from equilibrate_paper.runs.outputs import drawn_panels

UNFINISHED = 3
"""Exit code of a command that stopped at its time limit."""
app = typer.Typer(
    help="Reproduce the paper's figures and claims, or train with its schedule.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_DEFAULTS = training.Settings()
DataOption = Annotated[
    Path | None, typer.Option(help="Folder with the official files of MNIST and CIFAR-10.")
]


def run() -> None:
    """Run the command line. Errors that the user can fix are shown without a traceback."""
    try:
        app()
    except (ValueError, RecordError, DataError) as error:
        print(f"equilibrate-paper: {error}", file=sys.stderr)
        sys.exit(2)


@app.command()
def reproduce(
    panels: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIGURE", help=f"Any of {', '.join(PANELS)}; all by default."),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(help="quick (digits, minutes), or paper (MNIST and CIFAR-10, full size)."),
    ] = "quick",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    data_dir: DataOption = None,
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
    """
    _require_one("--draw-only", draw_only, "--overwrite", overwrite)
    console, chosen = Console(), panels or ()
    out = out or Path("runs") / f"reproduce-{profile}"
    change = " without --overwrite" if overwrite else ""
    with _continues(console, f"Run the same command again{change} to continue."):
        if draw_only:
            claims = reproduction.draw(chosen, out=out)
        else:
            claims = reproduction.reproduce(
                chosen,
                out=out,
                profile=profiles.profile(profile, epochs_scale, seeds),
                device=parse_device(device),
                data_dir=data_dir,
                overwrite=overwrite,
                max_minutes=max_minutes,
                console=console,
            )
    for table in terminal.claim_tables(verdicts.grouped(claims, chosen or drawn_panels(out))):
        console.print(table)
    for name in ("records", "figures", "claims.json", "tables.md", "report.html"):
        print(f"{name:<12} {out / name}")


@app.command()
def train(
    task: Annotated[
        str, typer.Option(help=f"One of {', '.join(training.TASKS)}.")
    ] = _DEFAULTS.task,
    epochs: Annotated[int, typer.Option(help="Number of epochs.")] = _DEFAULTS.epochs,
    lr: Annotated[float, typer.Option(help="Initial learning rate η.")] = _DEFAULTS.lr,
    momentum: Annotated[float, typer.Option(help="Momentum μ.")] = _DEFAULTS.momentum,
    weight_decay: Annotated[
        float, typer.Option(help="Coefficient λ of the L2 term.")
    ] = _DEFAULTS.weight_decay,
    batch_size: Annotated[int, typer.Option(help="Examples per batch.")] = _DEFAULTS.batch_size,
    threshold: Annotated[
        float,
        typer.Option(help="Lower the learning rate if |L/R − 1| is below it (X in the paper)."),
    ] = _DEFAULTS.threshold,
    factor: Annotated[
        float, typer.Option(help="Lower it to this factor times its value (the paper's 1 − Y).")
    ] = _DEFAULTS.factor,
    seed: Annotated[
        int, typer.Option(help="Seed of the initial weights and of the shuffling.")
    ] = _DEFAULTS.seed,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the record and its report.", show_default="runs/TASK"),
    ] = None,
    data_dir: DataOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing run.")
    ] = False,
) -> None:
    """Train a model with the adaptive schedule and make a report of the run."""
    _require_one("--resume", resume, "--overwrite", overwrite)
    settings = training.Settings(
        task, epochs, lr, momentum, weight_decay, batch_size, threshold, factor, seed
    )
    console, out = Console(), out or Path("runs") / task
    with (
        _continues(console, "Run again with --resume to continue."),
        progress_bars("epochs", console) as bars,
    ):
        bar = bars.add_task(task, total=epochs, status="")
        mode = "resume" if resume else "overwrite" if overwrite else "new"
        for epoch, status in training.train(settings, out, mode=mode, data_dir=data_dir):
            bars.update(bar, completed=epoch, status=status)
    print(training.summary(out))
    print(f"record  {out / 'train.jsonl'}")
    library.report(out)


def parse_device(name: str) -> torch.device:
    """Return the device of a name, after checking that it is available.

    Args:
        name: "cpu", "cuda", "cuda:1" and so on, or "auto" for the first GPU or else the CPU.

    Raises:
        ValueError: If the name is unknown, or the device is not available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown: use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported: use auto, cpu or cuda")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device={name!r} is not available: found {count} CUDA devices; use cpu")
    return device


def _require_one(first: str, is_first: bool, second: str, is_second: bool) -> None:
    if is_first and is_second:
        raise ValueError(f"{first} and {second} cannot be combined: choose one of them")


@contextmanager
def _continues(console: Console, hint: str) -> Iterator[None]:
    """Print how to continue after Ctrl-C, and at the time limit.

    Raises:
        KeyboardInterrupt: After Ctrl-C.
        Exit: With the code 3 at the time limit.
    """
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"Interrupted. {hint}")
        raise
    except Unfinished as error:
        console.print(f"{error}. {hint}", highlight=False)
        raise typer.Exit(UNFINISHED) from error
