"""Execute the runs that a reproduction still lacks, with progress bars."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import TaskID

from equilibrate.paper.analysis import results
from equilibrate.paper.data import datasets
from equilibrate.paper.protocol.profiles import Profile
from equilibrate.paper.protocol.run import Run
from equilibrate.paper.runs.errors import Diverged, RunError
from equilibrate.paper.runs.eta import RemainingTime, format_eta
from equilibrate.paper.runs.execute import execute
from equilibrate.paper.runs.folder import part_paths
from equilibrate.report.progress import progress_bars
from equilibrate.runlog import records


def run_missing(
    profile: Profile,
    panels: Sequence[str],
    out: Path,
    *,
    device: torch.device,
    data_dir: Path | str | None,
    overwrite: bool,
    console: Console,
) -> list[str]:
    """Execute the runs that some panels need and that are not complete yet.

    A run that diverges does not stop the others, except those that start from its end.

    Args:
        profile: The runs to choose from.
        panels: The panels to draw.
        out: The folder of the reproduction.
        device: The device to train on.
        data_dir: The folder with the data sets.
        overwrite: Whether to start all runs again.
        console: The console for the progress bars.

    Returns:
        A message for each run that diverged or could not start.
    """
    _require_profile(out, profile.name, overwrite)
    runs = profile.runs_for(panels)
    if not overwrite:
        runs = [run for run in runs if not _complete_in_parts(run, out)]
        _require_new_seeds(runs, out)
    names = dict.fromkeys(run.task.data for run in runs)
    data = {name: datasets.load(name, data_dir, progress=not console.quiet) for name in names}
    failed: dict[str, str] = {}
    remaining = RemainingTime(runs)
    with _threads(profile.threads), progress_bars("epochs", console, eta=False) as bars:
        total = bars.add_task("all runs", total=sum(run.epochs for run in runs), status="")
        done = 0
        for run in runs:
            if run.start in failed:
                failed[run.name] = f"{run.name}: not run, because {run.start} diverged"
                continue
            if overwrite:
                for path in part_paths(out, run.name):
                    path.unlink()
            bar = bars.add_task(run.name, total=run.epochs, status="")

            def progress(epoch: int, run: Run = run, bar: TaskID = bar, done: int = done) -> None:
                remaining.update(run.name, epoch, time.monotonic())
                eta, total_eta = remaining.seconds(run.name), remaining.seconds()
                bars.update(bar, completed=epoch, status=format_eta(eta))
                bars.update(total, completed=done + epoch, status=format_eta(total_eta))

            try:
                execute(
                    run,
                    out,
                    data[run.task.data],
                    profile=profile.name,
                    device=device,
                    overwrite=overwrite,
                    progress=progress,
                )
            except Diverged as error:
                failed[run.name] = str(error)
            done += run.epochs
    return list(failed.values())


def _require_profile(out: Path, profile: str, overwrite: bool) -> None:
    # A folder has runs of one profile, or figures would mix them. Overwriting removes the others.
    for path in results.record_files(out / "records"):
        other = records.read_header(path).config.get("profile")
        if other == profile:
            continue
        if not overwrite:
            raise RunError(
                f"{out} has results of the profile {other!r}: choose another folder for "
                f"{profile!r}, or overwrite it"
            )
        path.unlink()


def _complete_in_parts(run: Run, out: Path) -> bool:
    """Return whether the recorded parts of a run are together the whole run."""
    if not part_paths(out, run.name):
        return False
    joined = results.load(out / "records")[run.name]
    return joined.finished and joined.run == run


def _require_new_seeds(runs: Sequence[Run], out: Path) -> None:
    # A part would be ignored if its seeds are recorded already. A whole run replaces its parts.
    for path in results.record_files(out / "records"):
        recorded = Run.from_config(records.read_header(path).config)
        for run in runs:
            same = replace(recorded, name=run.name, seeds=run.seeds) == run
            seeds = sorted(set(run.seeds) & set(recorded.seeds))
            if same and seeds and run.name not in (run.whole_name, recorded.name):
                raise RunError(
                    f"{run.name} would repeat seeds {seeds[0]} to {seeds[-1]}, which are recorded "
                    f"in {path}: choose other seeds, or overwrite them"
                )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
