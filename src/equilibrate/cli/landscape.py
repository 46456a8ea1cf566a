"""The command `equilibrate landscape`."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from equilibrate.cli.device import DeviceOption, parse_device
from equilibrate.cli.interrupt import interrupt_message
from equilibrate.cli.modes import Mode, OverwriteOption, ResumeOption, parse_mode
from equilibrate.cli.tasks import load_task
from equilibrate.ensemble import Sampling
from equilibrate.landscape import Batch, NotEquilibratedError, Sweep, SweepRun, fit, plot
from equilibrate.landscape.points import point_from_dict
from equilibrate.paper.runs.training import TASKS, limit_threads
from equilibrate.report import figures
from equilibrate.report.progress import progress_bars
from equilibrate.runlog import checkpoints, files, records
from equilibrate.runlog.lock import lock

_SECONDS_BETWEEN_CHECKPOINTS = 30.0


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
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    draw_only: Annotated[
        bool,
        typer.Option(
            "--draw-only", help="Draw what is recorded in --out without running anything."
        ),
    ] = False,
) -> None:
    """Measure the loss landscape from the fluctuations at several learning rates.

    The exit status is 1 if nothing can be concluded, because FDR1 did not hold.
    """
    console = Console()
    out = out or Path("runs") / "landscape"
    record = out / "landscape.jsonl"
    mode = parse_mode(resume, overwrite)
    if draw_only:
        found, task = _recorded(record)
        _show(found, task, out, console)
        return
    rates = _parse_lrs(lrs)
    settings = {
        "batch_size": batch_size,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "threshold": threshold,
        "max_epochs": max_epochs,
        "epochs": epochs,
    }
    config = {"task": task, "lrs": rates, "seeds": seeds, "sampling": sampling, **settings}
    kind = _parse_sampling(sampling)
    limit_threads(task)
    torch_device = parse_device(device)
    build_model, loss, data = load_task(task, data_dir)
    _require_absent(record, mode)
    run = SweepRun(
        build_model,
        loss,
        data,
        lrs=rates,
        seeds=range(seeds),
        sampling=kind,
        device=torch_device,
        **settings,
    )
    config |= {"steps_per_epoch": run.result().steps_per_epoch, "data": _fingerprint(data)}
    with interrupt_message(console, "Run again with --resume to continue."):
        _measure(run, record, config, mode, console)
    _show(run.result(), task, out, console)


def _measure(
    run: SweepRun, record: Path, config: dict[str, Any], mode: Mode, console: Console
) -> None:
    """Run the sweep, or what is left of it, and record each point."""
    checkpoint = record.with_suffix(".pt")
    total = len(config["lrs"])
    with lock(record.parent):
        state = checkpoints.load(checkpoint) if mode == "resume" else None
        keep = state["rows"] if state else 0
        with (
            records.Writer(record, config=config, mode=mode, keep=keep) as writer,
            progress_bars("learning rates", console, eta=False) as bars,
        ):
            if state:
                run.load_state_dict(state["run"])
            else:  # a checkpoint of an earlier record must not be used after a kill
                checkpoints.remove(checkpoint)
            bar = bars.add_task("", total=total, status="", completed=len(run.points))
            saved = time.monotonic()

            def progress(lr: float, epoch: int, residual: float) -> None:
                bars.update(bar, status=f"η {lr:g}  epoch {epoch}  L/R − 1 = {residual:+.3f}")

            while not run.finished:
                point = run.run_epoch(progress)
                if point is not None:
                    writer.write(asdict(point))
                    writer.sync()
                    bars.update(bar, completed=len(run.points))
                if point is not None or time.monotonic() > saved + _SECONDS_BETWEEN_CHECKPOINTS:
                    checkpoints.save(checkpoint, {"run": run.state_dict(), "rows": writer.count})
                    saved = time.monotonic()
            bars.update(bar, status="")


def _show(found: Sweep, task: str, out: Path, console: Console) -> None:
    # Draw the figure and print the summary, or why there is no conclusion.
    try:
        fitted = fit(found)
        summary, status = fitted.summary(), int(bool(fitted.unsettled))
    except NotEquilibratedError as error:
        fitted, summary, status = None, f"No conclusion: {error}.", 1
    figure = figures.save(plot.draw(found, fitted, title=task), out / "landscape.png")
    files.write(out / "landscape.txt", summary + "\n")
    console.print(summary, highlight=False)
    console.print(f"record  {out / 'landscape.jsonl'}\nfigure  {figure}", highlight=False)
    if status:
        raise typer.Exit(status)


def _recorded(record: Path) -> tuple[Sweep, str]:
    # The measurements of a record, and its task.
    read = records.read(record)
    config = read.config
    try:
        points = sorted(map(point_from_dict, read.rows), key=lambda point: point.lr)
        settings = (
            config["momentum"],
            0.0,
            _parse_sampling(config["sampling"]),
            config["steps_per_epoch"],
            config["threshold"],
        )
        task = config["task"]
    except (KeyError, TypeError) as error:
        raise records.RecordError(
            f"{record} is not a record of this version of equilibrate landscape ({error}): measure "
            "again with --overwrite"
        ) from error
    if not points:
        raise records.RecordError(f"{record} has no learning rate yet: continue with --resume")
    return Sweep(tuple(points), *settings), task


def _fingerprint(data: Batch) -> str:
    """Return the SHA-256 checksum of the examples, so that a run is resumed with the same ones."""
    digest = hashlib.sha256()
    for tensor in data:
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _require_absent(record: Path, mode: Mode) -> None:
    if record.exists() and mode == "new":
        raise records.RecordError(
            f"{record} already exists: use --resume, --overwrite, or another folder with --out"
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
