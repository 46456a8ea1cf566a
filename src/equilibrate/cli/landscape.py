"""`equilibrate landscape`: G(η) of a model over learning rates and seeds, fitted and drawn."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeGuard

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import nn
from torch.nn.functional import cross_entropy

from equilibrate import landscape
from equilibrate.ensemble import Sampling
from equilibrate.landscape import Batch, Loss
from equilibrate.landscape import plot as landscape_figure
from equilibrate.paper.data import datasets as data
from equilibrate.paper.protocol import models
from equilibrate.paper.runs.training import TASKS, spare_threads
from equilibrate.report import figures as plots
from equilibrate.runlog import devices, records

Task = tuple[Callable[[int], nn.Module], Batch, Loss]
"""A model from a seed, (inputs, targets), and the loss."""


def command(
    task: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(TASKS)}, or MODULE:FUNCTION of your own, which returns "
            "(a function from seed to model, (inputs, targets), the loss)."
        ),
    ] = "digits-mlp",
    lrs: Annotated[
        str, typer.Option(help="Learning rates η, with commas between them.")
    ] = "0.3,0.2,0.1,0.05",
    seeds: Annotated[int, typer.Option(help="Replicas, at least 2.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Examples in a batch.")] = 100,
    momentum: Annotated[float, typer.Option(help="Momentum μ.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="L2 term λ.")] = 0.01,
    sampling: Annotated[
        str, typer.Option(help="independent: unbiased. shuffled: the paper's epochs.")
    ] = "independent",
    tolerance: Annotated[
        float, typer.Option(help="FDR1 holds where |L/R − 1| is below it.")
    ] = 0.02,
    max_epochs: Annotated[int, typer.Option(help="Epochs to wait for that at a rate.")] = 2000,
    epochs: Annotated[
        int | None, typer.Option(help="Do not wait: so many epochs at each rate, as in the paper.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder for record, figure and summary (runs/landscape).")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with MNIST or CIFAR-10 in their official layout.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the run again.")] = False,
) -> None:
    """Read the loss landscape off the fluctuations at several learning rates."""
    rates = _rates(lrs)
    if sampling not in ("independent", "shuffled"):
        raise ValueError(f"sampling must be independent or shuffled, got {sampling!r}")
    kind: Sampling = "shuffled" if sampling == "shuffled" else "independent"
    out = out or Path("runs") / "landscape"
    config = {
        "task": task,
        "lrs": rates,
        "seeds": seeds,
        "batch_size": batch_size,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "sampling": sampling,
        "tolerance": tolerance,
        "max_epochs": max_epochs,
        "epochs": epochs,
    }
    spare_threads(task)
    on = devices.find(device)
    build, examples, loss = find_task(task, data_dir)
    console = Console()
    record = out / "landscape.jsonl"
    if record.exists() and not overwrite:
        raise records.RecordError(
            f"{record} holds an earlier run: give --overwrite, or another folder with --out"
        )
    with (
        records.lock(out),
        records.Writer(record, config=config, mode="overwrite" if overwrite else "new") as writer,
        _bar(console) as bar,
    ):
        job = bar.add_task("", total=len(rates), status="")

        def tell(lr: float, epoch: int, residual: float) -> None:
            # Rates are gone through from the largest down.
            done = sorted(rates, reverse=True).index(lr)
            status = f"η {lr:g}  epoch {epoch}  L/R − 1 = {residual:+.3f}"
            bar.update(job, completed=done, status=status)

        found = landscape.sweep(
            build,
            loss,
            examples,
            lrs=rates,
            seeds=range(seeds),
            batch_size=batch_size,
            momentum=momentum,
            weight_decay=weight_decay,
            sampling=kind,
            threshold=tolerance,
            max_epochs=max_epochs,
            epochs=epochs,
            device=on,
            progress=tell,
            on_point=lambda point: writer.write(asdict(point)),
        )
        bar.update(job, completed=len(rates), status="")
    fit = landscape.fit(found)
    figure = plots.save(landscape_figure.draw(found, fit, title=task), out / "landscape.png")
    (out / "landscape.txt").write_text(fit.summary() + "\n", encoding="utf-8")
    console.print(fit.summary(), highlight=False)
    console.print(f"record  {record}\nfigure  {figure}", highlight=False)


def find_task(task: str, data_dir: Path | None = None) -> Task:
    """A task of ours by its name, or a user's own as MODULE:FUNCTION."""
    if task in TASKS:
        dataset = data.load(TASKS[task], data_dir, progress=True)
        images, labels = dataset.train_images, dataset.train_labels
        return lambda seed: models.build(task, seed), (images, labels), cross_entropy
    module, colon, name = task.partition(":")
    if not colon:
        raise ValueError(
            f"task must be one of {', '.join(TASKS)}, or MODULE:FUNCTION of your own, got {task!r}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module beside the user, as python -m would find it
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task {task!r} cannot be imported: {error}") from error
    found = function() if callable(function) else function
    if not _is_task(found):
        raise ValueError(
            f"task {task!r} must return (a function from seed to model, (inputs, targets), the "
            f"loss), got {_kinds(found)}"
        )
    return found


def _is_task(found: object) -> TypeGuard[Task]:
    match found:
        case (build, (_, _), loss):
            # A model can be called too, but not with a seed.
            return callable(build) and callable(loss) and not isinstance(build, nn.Module)
    return False


def _kinds(found: object) -> str:
    """Of what types a value, or each member of a tuple, is."""
    if isinstance(found, tuple):
        return f"({', '.join(map(_kinds, found))})"
    return type(found).__name__


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"lrs must be numbers such as 0.1,0.05,0.02, got {text!r}") from None


def _bar(console: Console) -> Progress:
    counted, status = "{task.completed}/{task.total} rates", "{task.fields[status]}"
    return Progress(BarColumn(), TextColumn(counted), TextColumn(status), console=console)
