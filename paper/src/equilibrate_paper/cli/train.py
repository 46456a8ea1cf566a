"""The command `equilibrate train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from equilibrate.runlog import records
from equilibrate_paper.cli.interrupt import interrupt_message
from equilibrate_paper.cli.modes import OverwriteOption, ResumeOption, parse_mode
from equilibrate_paper.output import drawing
from equilibrate_paper.progress import progress_bars
from equilibrate_paper.runs import training

_DEFAULTS = training.Settings()


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
        typer.Option(
            help="Lower the learning rate if |L/R − 1| is below this value (X in the paper)."
        ),
    ] = _DEFAULTS.threshold,
    factor: Annotated[
        float,
        typer.Option(
            help="The new learning rate is this factor times the old one (1 − Y in the paper)."
        ),
    ] = _DEFAULTS.factor,
    seed: Annotated[
        int, typer.Option(help="Seed of the initial weights and of the shuffling.")
    ] = _DEFAULTS.seed,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the record and the figure.", show_default="runs/TASK"),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the official files of MNIST or CIFAR-10.")
    ] = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Train a model with the adaptive schedule and plot the result."""
    mode = parse_mode(resume, overwrite)
    settings = training.Settings(
        task=task,
        epochs=epochs,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        batch_size=batch_size,
        threshold=threshold,
        factor=factor,
        seed=seed,
    )
    console = Console()
    training.limit_threads(task)
    out = out or Path("runs") / task
    with (
        interrupt_message(console, "Run again with --resume to continue."),
        progress_bars("epochs", console) as bars,
    ):
        bar = bars.add_task(task, total=epochs, status="")
        for row in training.train(settings, out, mode=mode, data_dir=data_dir):
            bars.update(bar, completed=row["epoch"], status=_status(row))
    rows = records.read(out / "train.jsonl").rows
    figure = drawing.save(drawing.training(rows, title=task), out / "train.png")
    last, decreases = rows[-1], sum(row["lowered"] for row in rows)
    lowered = f"lowered {decreases} times, to" if decreases else "not lowered:"
    console.print(
        f"{len(rows)} epochs, learning rate {lowered} {last['next_lr']:.3g}, "
        f"test accuracy {last['test_accuracy']:.1%}"
    )
    console.print(f"record  {out / 'train.jsonl'}\nfigure  {figure}", highlight=False)


def _status(row: dict[str, Any]) -> str:
    return f"loss {row['loss']:.3f}  η {row['lr']:.3g}  {row['reason']}"
