"""The paper from one command: run what is missing, draw it, and say which claims hold."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import TaskID

from equilibrate.runlog import records
from equilibrate.paper.analysis import verdicts
from equilibrate.report import claims
from equilibrate.paper.data import datasets as data
from equilibrate.runlog import devices
from equilibrate.paper.output import figures
from equilibrate.paper.output import page
from equilibrate.paper.protocol import profiles
from equilibrate.paper.analysis import results
from equilibrate.paper.runs import execute as runs
from equilibrate.paper.output import tables
from equilibrate.paper.output import terminal
from equilibrate.paper.runs import timings
from equilibrate.report.claims import JudgedClaim
from equilibrate.report.tables import to_markdown
from equilibrate.paper.runs.eta import Forecast, spoken
from equilibrate.paper.protocol.panels import PANELS
from equilibrate.paper.protocol.profiles import Profile
from equilibrate.paper.protocol.run import Run
from equilibrate.paper.runs.execute import Diverged, RunError


def command(
    panels: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIGURE", help=f"Any of {', '.join(PANELS)}; all if none."),
    ] = None,
    profile: Annotated[
        str, typer.Option(help="quick: digits, minutes. paper: MNIST and CIFAR-10, in full.")
    ] = "quick",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with MNIST and CIFAR-10 in their official layout.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all results (runs/reproduce-PROFILE).")
    ] = None,
    epochs_scale: Annotated[
        float, typer.Option(help="Share of the epochs to run, in (0, 1].")
    ] = 1.0,
    seeds: Annotated[int | None, typer.Option(help="Seeds at most (all).")] = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="RUN:FIRST-LAST",
            help="Of one run that the figures need make only these seeds, such as "
            "cnn-sequence:100-107; parts made one by one, on several machines perhaps, are joined.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start all runs again.")] = False,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Draw and judge what is recorded; run nothing.")
    ] = False,
) -> None:
    """Run the paper's experiments, draw its figures, and say which of its claims hold.

    Stopped at any moment and started again with the same command, it goes on where it was.
    """
    console = Console()
    out = out or Path("runs") / f"reproduce-{profile}"
    try:
        found = reproduce(
            panels or (),
            profile=profile,
            device=device,
            data_dir=data_dir,
            out=out,
            epochs_scale=epochs_scale,
            seeds=seeds,
            part=part,
            overwrite=overwrite,
            draw_only=draw_only,
            console=console,
        )
    except KeyboardInterrupt:
        same = "the same command" + (" without --overwrite" if overwrite else "")
        console.print(f"stopped; {same} goes on where it was")
        raise
    for table in terminal.claim_tables(verdicts.grouped(found, panels or _drawn(out))):
        console.print(table)
    for name in ("records", "figures", "claims.json", "tables.md", "report.html"):
        console.print(f"{name:<12} {out / name}", highlight=False, soft_wrap=True)


def reproduce(
    panels: Sequence[str] = (),
    *,
    out: Path | str,
    profile: str = "quick",
    device: str = "auto",
    data_dir: Path | str | None = None,
    epochs_scale: float = 1.0,
    seeds: int | None = None,
    part: str | None = None,
    overwrite: bool = False,
    draw_only: bool = False,
    console: Console | None = None,
) -> list[JudgedClaim]:
    """Make records, figures, claims.json, tables.md and report.html; all panels by default.

    Runs that several panels share are made once, and those that are there already are kept.
    """
    unknown = [panel for panel in panels if panel not in PANELS]
    if unknown:
        raise ValueError(f"figure {unknown[0]!r} is unknown; choose from {', '.join(PANELS)}")
    plan = profiles.profile(profile, epochs_scale, seeds)
    absent = [panel for panel in panels if panel not in plan.panels]
    if absent:
        raise ValueError(
            f"figure {absent[0]!r} is not part of the profile {profile!r}: it needs a GPU and the "
            "profile 'paper'"
        )
    if draw_only and overwrite:
        raise ValueError("draw_only and overwrite exclude each other: give one of them")
    wanted = panels or plan.panels
    if part is not None:
        plan = plan.with_part(part)
        name = part.partition(":")[0]
        if plan.runs[name] not in plan.needed(wanted):
            raise ValueError(
                f"part={part!r} would not be made, since no {name} is needed for "
                f"{', '.join(wanted)}: name a figure that needs it, or none"
            )
    console = console or Console(quiet=True)
    out = Path(out)
    on = None if draw_only else devices.find(device)
    if on is not None:
        wanted = _within_reach(panels, plan, on)
    elif not out.is_dir():
        raise RunError(f"{out} does not exist: name the folder of a reproduction, or run it first")
    with _disk(out), records.lock(out), _warnings_to(console):
        failures = []
        if on is not None:
            _refuse_others(out, profile, overwrite)
            failures = _run(plan, wanted, out, on, data_dir, overwrite, console)
        if failures:
            with suppress(RunError):  # nothing to draw is not the news
                write(out)
            raise Diverged("\n".join(failures))
        return write(out, panels)


def write(out: Path, panels: Sequence[str] = ()) -> list[JudgedClaim]:
    """Draw and judge what out/records holds, without running anything."""
    recorded = results.load(out / "records")
    drawable = [
        panel
        for panel in PANELS
        if all(name in recorded and len(recorded[name].epoch) for name in PANELS[panel].runs)
    ]
    missing = [panel for panel in panels if panel not in drawable]
    if missing or not drawable:
        what = f"figure {missing[0]}" if missing else "any figure"
        raise RunError(f"{out / 'records'} lacks runs for {what}: run it first")
    for panel in panels or drawable:
        figures.save(panel, recorded, out / "figures")
    found = verdicts.judge(recorded)
    claims.save(found, out / "claims.json")
    noted = timings.load(out).values()
    current = [timing for timing in noted if runs.record_path(out, timing.run).exists()]
    numbers = tables.numbers(recorded, current)
    listed = [tables.claim_table(group) for group in verdicts.grouped(found)]
    text = to_markdown([tables.summary(found), *listed, *numbers])
    (out / "tables.md").write_text(text, encoding="utf-8")
    drawn = [panel for panel in _drawn(out) if panel in drawable]
    text = page.compose(out, found, drawn, recorded, numbers)
    (out / "report.html").write_text(text, encoding="utf-8")
    return found


def _drawn(out: Path) -> list[str]:
    """The panels of which there is a figure."""
    return [panel for panel in PANELS if (out / "figures" / f"fig{panel}.svg").exists()]


def _run(
    plan: Profile,
    panels: Sequence[str],
    out: Path,
    device: torch.device,
    data_dir: Path | str | None,
    overwrite: bool,
    console: Console,
) -> list[str]:
    """Make the runs that are missing; those that diverged are told of and left."""
    todo = [run for run in plan.needed(panels) if overwrite or not _made_in_parts(run, out)]
    if not overwrite:
        _refuse_seeds_twice(todo, out)
    sets = {name: data.load(name, data_dir, progress=not console.quiet) for name in _data(todo)}
    failed: dict[str, str] = {}
    forecast = Forecast(todo)
    with _threads(plan.threads), terminal.bars(console) as bars:
        total = bars.add_task("all runs", total=sum(run.epochs for run in todo), left="")
        done = 0
        for run in todo:
            if run.start in failed:
                failed[run.name] = f"{run.name}: not run, since {run.start} diverged"
                continue
            if overwrite:
                for path in _parts(run, out):
                    path.unlink()
            bar = bars.add_task(run.name, total=run.epochs, left="")

            def progress(epoch: int, run: Run = run, bar: TaskID = bar, done: int = done) -> None:
                forecast.note(run.name, epoch, time.monotonic())
                own = spoken(forecast.left(run.name))
                bars.update(bar, completed=epoch, left=own)
                bars.update(total, completed=done + epoch, left=spoken(forecast.left()))

            try:
                runs.execute(
                    run,
                    out,
                    sets[run.task.data],
                    profile=plan.name,
                    device=device,
                    overwrite=overwrite,
                    progress=progress,
                )
            except Diverged as error:
                failed[run.name] = str(error)
            done += run.epochs
    return list(failed.values())


def _made_in_parts(run: Run, out: Path) -> bool:
    """Whether parts of the run, each with some of its seeds, make up the whole of it."""
    if not _parts(run, out):
        return False
    joined = results.load(out / "records")[run.name]
    return joined.finished and joined.run == run


def _parts(run: Run, out: Path) -> list[Path]:
    return list((out / "records").glob(f"{run.name}.*.jsonl"))


def _refuse_seeds_twice(todo: Sequence[Run], out: Path) -> None:
    """A part of which seeds are recorded would be made in vain; only the whole run may be."""
    for path in results.record_files(out / "records"):
        there = Run.from_config(records.read(path).config)
        for run in todo:
            same = replace(there, name=run.name, seeds=run.seeds) == run
            again = sorted(set(run.seeds) & set(there.seeds))
            if same and again and run.name not in (run.whole_name, there.name):
                raise RunError(
                    f"{run.name} would make seeds {again[0]} to {again[-1]} again, which {path} "
                    "holds: choose others, or overwrite them"
                )


def _data(todo: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.task.data for run in todo))


def _within_reach(panels: Sequence[str], plan: Profile, device: torch.device) -> Sequence[str]:
    """The panels asked for, or all that the device can make."""
    beyond = [panel for panel in plan.panels if PANELS[panel].gpu and device.type != "cuda"]
    refused = [panel for panel in panels if panel in beyond]
    if refused:
        raise ValueError(
            f"figure {refused[0]!r} compares precisions of products, of which a CPU has one: run "
            "it on a GPU"
        )
    return panels or [panel for panel in plan.panels if panel not in beyond]


def _refuse_others(out: Path, profile: str, overwrite: bool) -> None:
    """One folder holds one profile: figures of another would be mixed in."""
    for path in results.record_files(out / "records"):
        other = records.read(path).config.get("profile")
        if other == profile:
            continue
        if not overwrite:
            raise RunError(
                f"{out} holds results of the profile {other!r}: choose another folder for "
                f"{profile!r}, or overwrite it"
            )
        path.unlink()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _disk(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write to {out} ({error.strerror or error}); what was recorded is safe: make "
            "room or mend it, and start the same command again"
        ) from error


@contextmanager
def _warnings_to(console: Console) -> Iterator[None]:
    """Say warnings (of a damaged checkpoint, say) in one line, above the bars."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: console.print(str(message), style="yellow")
        yield
