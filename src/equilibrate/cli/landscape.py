"""The command `equilibrate landscape`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from equilibrate.cli.device import DeviceOption, parse_device
from equilibrate.cli.tasks import load_task
from equilibrate.ensemble import Sampling
from equilibrate.landscape import fit, plot, sweep
from equilibrate.paper.runs.training import TASKS, limit_threads
from equilibrate.report import figures
from equilibrate.report.progress import progress_bars
from equilibrate.runlog import records
from equilibrate.runlog.lock import lock


def landscape(
    task: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(TASKS)}, or MODULE:FUNCTION with a function that returns (a "
            "function from seed to model, the loss, (inputs, targets))."
        ),
    ] = "digits-mlp",
    lrs: Annotated[
        str, typer.Option(help="Learning rates η, separated by commas.")
    ] = "0.3,0.2,0.1,0.05",
    seeds: Annotated[int, typer.Option(help="Number of seeds, at least 2.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Examples per batch.")] = 100,
    momentum: Annotated[float, typer.Option(help="Momentum μ.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Coefficient λ of the L2 term.")] = 0.01,
    sampling: Annotated[
        str, typer.Option(help="independent (unbiased), or shuffled (epochs as in the paper).")
    ] = "independent",
    threshold: Annotated[
        float, typer.Option(help="Measure a learning rate once |L/R − 1| is below this value.")
    ] = 0.02,
    max_epochs: Annotated[
        int, typer.Option(help="Maximum number of epochs to wait for this.")
    ] = 2000,
    epochs: Annotated[
        int | None,
        typer.Option(help="Train for this number of epochs at each learning rate instead."),
    ] = None,
    device: DeviceOption = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the record, the figure and the summary.",
            show_default="runs/landscape",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the official files of MNIST or CIFAR-10.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing run.")
    ] = False,
) -> None:
    """Measure the loss landscape from the fluctuations at several learning rates."""
    rates = _parse_lrs(lrs)
    kind = _parse_sampling(sampling)
    out = out or Path("runs") / "landscape"
    config = {
        "task": task,
        "lrs": rates,
        "seeds": seeds,
        "batch_size": batch_size,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "sampling": sampling,
        "threshold": threshold,
        "max_epochs": max_epochs,
        "epochs": epochs,
    }
    limit_threads(task)
    torch_device = parse_device(device)
    build_model, loss, data = load_task(task, data_dir)
    console = Console()
    record = out / "landscape.jsonl"
    _require_absent(record, overwrite)
    with (
        lock(out),
        records.Writer(record, config=config, mode="overwrite" if overwrite else "new") as writer,
        progress_bars("learning rates", console, eta=False) as bars,
    ):
        bar = bars.add_task("", total=len(rates), status="")

        def progress(lr: float, epoch: int, residual: float) -> None:
            done = sorted(rates, reverse=True).index(lr)  # the largest rate comes first
            status = f"η {lr:g}  epoch {epoch}  L/R − 1 = {residual:+.3f}"
            bars.update(bar, completed=done, status=status)

        found = sweep(
            build_model,
            loss,
            data,
            lrs=rates,
            seeds=range(seeds),
            batch_size=batch_size,
            momentum=momentum,
            weight_decay=weight_decay,
            sampling=kind,
            threshold=threshold,
            max_epochs=max_epochs,
            epochs=epochs,
            device=torch_device,
            progress=progress,
            on_point=lambda point: writer.write(asdict(point)),
        )
        bars.update(bar, completed=len(rates), status="")
    fitted = fit(found)
    figure = figures.save(plot.draw(found, fitted, title=task), out / "landscape.png")
    (out / "landscape.txt").write_text(fitted.summary() + "\n", encoding="utf-8")
    console.print(fitted.summary(), highlight=False)
    console.print(f"record  {record}\nfigure  {figure}", highlight=False)


def _require_absent(record: Path, overwrite: bool) -> None:
    if record.exists() and not overwrite:
        raise records.RecordError(
            f"{record} already exists: use --overwrite, or another folder with --out"
        )


def _parse_sampling(text: str) -> Sampling:
    for kind in get_args(Sampling):
        if text == kind:
            return kind
    raise ValueError(f"sampling must be one of {', '.join(get_args(Sampling))}, got {text!r}")


def _parse_lrs(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"lrs must be numbers such as 0.1,0.05,0.02, got {text!r}") from None
