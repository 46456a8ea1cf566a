"""The command line: `equilibrate …` or `python -m equilibrate …`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from equilibrate import __version__
from equilibrate.cli import landscape as landscape_command
from equilibrate.paper.data import datasets as data
from equilibrate.paper.runs import reproduce, training
from equilibrate.report import figures as plots
from equilibrate.runlog import checkpoints, records

app = typer.Typer(
    help="Tell when SGD has equilibrated, act on it, and read the loss landscape.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()

_DEFAULTS = training.Settings()
_EXPECTED = (ValueError, records.RecordError, checkpoints.CheckpointError, data.DataError)


def _say_version(wanted: bool) -> None:
    if wanted:
        console.print(f"equilibrate {__version__}", highlight=False)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Say the version and stop.", callback=_say_version, is_eager=True
        ),
    ] = False,
) -> None:
    return


@app.command()
def train(
    task: Annotated[
        str, typer.Option(help=f"One of {', '.join(training.TASKS)}.")
    ] = _DEFAULTS.task,
    epochs: Annotated[int, typer.Option(help="Epochs to train.")] = _DEFAULTS.epochs,
    lr: Annotated[float, typer.Option(help="Initial learning rate η.")] = _DEFAULTS.lr,
    momentum: Annotated[float, typer.Option(help="Momentum μ.")] = _DEFAULTS.momentum,
    weight_decay: Annotated[float, typer.Option(help="L2 term λ.")] = _DEFAULTS.weight_decay,
    batch_size: Annotated[int, typer.Option(help="Images in a batch.")] = _DEFAULTS.batch_size,
    tolerance: Annotated[
        float, typer.Option(help="X: equilibrated where |L/R − 1| is below it.")
    ] = _DEFAULTS.tolerance,
    decrease: Annotated[
        float, typer.Option(help="Y: the learning rate is then lowered by this fraction.")
    ] = _DEFAULTS.decrease,
    seed: Annotated[int, typer.Option(help="Seed of weights and shuffling.")] = _DEFAULTS.seed,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the record and figure (runs/TASK).")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with MNIST or CIFAR-10 in their official layout.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stopped run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start a run again.")] = False,
) -> None:
    """Train a model with the adaptive schedule and draw what happened."""
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: give one of them")
    settings = training.Settings(
        task, epochs, lr, momentum, weight_decay, batch_size, tolerance, decrease, seed
    )
    training.spare_threads(task)
    out = out or Path("runs") / task
    mode = "resume" if resume else "overwrite" if overwrite else "new"
    try:
        with _bar() as bar:
            job = bar.add_task(task, total=epochs, status="")
            for row in training.train(settings, out, mode=mode, data_dir=data_dir):
                bar.update(job, completed=row["epoch"], status=_status(row))
    except KeyboardInterrupt:
        console.print("stopped; --resume goes on where it was")
        raise
    rows = records.read(out / "train.jsonl").rows
    figure = plots.save(plots.training(rows, title=task), out / "train.png")
    last, lowered = rows[-1], sum(row["lowered"] for row in rows)
    console.print(
        f"{len(rows)} epochs, η lowered {lowered} times to {last['lr']:.3g}; "
        f"test accuracy {last['test_accuracy']:.1%}"
    )
    console.print(f"record  {out / 'train.jsonl'}\nfigure  {figure}", highlight=False)


app.command("landscape")(landscape_command.command)
app.command("reproduce")(reproduce.command)


def _bar() -> Progress:
    columns = ["{task.description}", BarColumn(), "{task.completed}/{task.total}"]
    left = TimeRemainingColumn(table_column=Column(min_width=7))  # a long status would cut it
    return Progress(*columns, left, TextColumn("{task.fields[status]}"))


def _status(row: dict[str, Any]) -> str:
    return f"loss {row['loss']:.3f}  η {row['lr']:.3g}  {row['reason']}"


def main() -> None:
    """Run the command line; what a person can mend is said in one line, without a traceback."""
    try:
        app()
    except _EXPECTED as error:
        Console(stderr=True).print(f"equilibrate: {error}", style="red", highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
