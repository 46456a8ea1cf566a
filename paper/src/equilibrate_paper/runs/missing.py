"""Execute the runs that a reproduction still lacks, with progress bars."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from equilibrate.runlog import records
from equilibrate_paper.analysis import results
from equilibrate_paper.data import datasets
from equilibrate_paper.progress import progress_bars
from equilibrate_paper.protocol.profiles import Profile
from equilibrate_paper.protocol.run import Run, whole_name
from equilibrate_paper.runs import timings
from equilibrate_paper.runs.errors import Diverged, RunError
from equilibrate_paper.runs.eta import RemainingTime, format_eta
from equilibrate_paper.runs.execute import execute
from equilibrate_paper.runs.ranks import Ranks
from equilibrate_paper.runs.shares import (
    assign,
    cut,
    epochs_done,
    missing_parts,
    records_to_replace,
)

_SINGLE = Ranks()


@dataclass(frozen=True)
class Outcome:
    """What became of the runs."""

    failures: tuple[str, ...]
    """A message for each run that diverged or could not start."""
    epochs_left: int
    """Number of epochs that were not executed because of the time limit."""
    seconds_left: float | None
    """Estimate of the time that they take; None if it is unknown."""


def run_missing(
    profile: Profile,
    panels: Sequence[str],
    out: Path,
    *,
    device: torch.device,
    data_dir: Path | str | None,
    overwrite: bool,
    console: Console,
    ranks: Ranks = _SINGLE,
    stop_at: float = math.inf,
) -> Outcome:
    """Execute the runs that some panels need and that are not complete yet.

    A run that diverges does not stop the others, except those that start from its end. Every rank
    executes some of the seeds of each run. It must call this function with the same arguments, and
    gets the same result.

    Args:
        profile: The runs to choose from.
        panels: The panels to draw.
        out: The folder of the reproduction.
        device: The device to train on.
        data_dir: The folder with the data sets.
        overwrite: Whether to start all runs again.
        console: The console for the progress bars of this rank.
        ranks: The processes that execute the runs together.
        stop_at: The time, as given by `time.monotonic()`, by which to save a checkpoint and stop.

    Returns:
        The failures, and what is left if the time was too short.
    """
    runs = profile.runs_for(panels)
    # Rank 0 decides alone: the others could read the folder after some rank has written to it.
    plan = ranks.first(lambda: _plan(profile, runs, out, overwrite, ranks.size))
    own = [Run.from_config(config) for config in plan[ranks.rank]]
    names = {config["task"]["data"] for configs in plan for config in configs}
    data: dict[str, datasets.Dataset] = {}

    def load(names: set[str]) -> None:
        for name in sorted(names - set(data)):
            data[name] = datasets.load(name, data_dir, progress=not console.quiet)

    # One rank of each machine downloads what all need.
    ranks.together(lambda: load(names if ranks.local_rank == 0 else set()))
    ranks.together(lambda: load({run.task.data for run in own}))
    if overwrite:
        ranks.first(lambda: _remove_replaced(runs, plan, out))
    failed: dict[str, str] = {}
    remaining = RemainingTime(
        own,
        {run.name: math.floor(epochs_done(run, out)) for run in own if not overwrite},
        _finished(profile, out),
    )
    to_do = remaining.epochs

    def execute_own(stage: Sequence[Run], show: _Progress) -> tuple[dict[str, str], bool]:
        # Execute runs of this rank. Return messages of those that failed, and whether it stopped.
        messages: dict[str, str] = {}
        stopped = False
        for run in stage:
            if run.start in failed:
                name = run.whole_name
                messages[name] = f"{name}: not run, because {run.start} diverged"
                continue
            # Every call executes something, so that repeated calls with any limit come to an end.
            if time.monotonic() >= stop_at and remaining.epochs < to_do:
                stopped = True
                break
            try:
                complete = execute(
                    run,
                    out,
                    data[run.task.data],
                    profile=profile.name,
                    device=device,
                    overwrite=overwrite,
                    stop_at=stop_at,
                    progress=show.callback(run),
                )
            except Diverged as error:
                messages[run.name] = str(error)
                continue
            if not complete:
                stopped = True
                break
        if ranks.size > 1:
            show.wait()
        return messages, stopped

    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    bars = progress_bars("epochs", console, eta=False)
    stopped = False
    with on_device, _threads(profile.threads), bars:
        show = _Progress(bars, own, remaining)
        # Runs from whose end others start must be complete before any rank starts those.
        stages = [run for run in own if run.start is None], [run for run in own if run.start]
        for stage in stages:
            if stopped:
                break
            for messages, early in ranks.together(partial(execute_own, stage, show)):
                failed |= messages
                stopped |= early
    left = ranks.together(lambda: (remaining.epochs, remaining.seconds()))
    times = [seconds for _, seconds in left if seconds is not None]
    return Outcome(
        failures=tuple(failed.values()),
        epochs_left=sum(epochs for epochs, _ in left) if stopped else 0,
        seconds_left=max(times) if len(times) == len(left) else None,
    )


class _Progress:
    """A bar for each run that has begun, and one for all runs of this rank."""

    def __init__(self, bars: Progress, runs: Sequence[Run], remaining: RemainingTime) -> None:
        self._bars = bars
        self._remaining = remaining
        self._total = bars.add_task("all runs", total=sum(run.epochs for run in runs), status="")
        self._begun = 0

    def callback(self, run: Run) -> Callable[[int], None]:
        """Add a bar.

        Returns:
            The function that updates it with the number of completed epochs.
        """
        bar = self._bars.add_task(run.name, total=run.epochs, status="")
        before = self._begun
        self._begun += run.epochs

        def update(epoch: int) -> None:
            self._remaining.update(run.name, epoch, time.monotonic())
            eta, total_eta = self._remaining.seconds(run.name), self._remaining.seconds()
            self._bars.update(bar, completed=epoch, status=format_eta(eta))
            self._bars.update(self._total, completed=before + epoch, status=format_eta(total_eta))

        return update

    def wait(self) -> None:
        """Show that this rank has nothing to do until the others are ready."""
        self._bars.update(self._total, status="waiting for the other processes")


def _plan(
    profile: Profile, runs: Sequence[Run], out: Path, overwrite: bool, size: int
) -> list[list[dict[str, Any]]]:
    """Return the runs and parts of runs that each rank executes, in the form of `to_config`."""
    _require_profile(out, profile.name, overwrite)
    if not overwrite:
        _require_new_seeds(runs, out)
    starts = {run.start for run in profile.runs.values()}
    parts: list[Run] = []
    for run in runs:
        count = 1 if run.name in starts else size
        parts += cut(run, run.seeds, count) if overwrite else missing_parts(run, out, count)
    work = [(part, part.epochs - (0 if overwrite else epochs_done(part, out))) for part in parts]
    return [[part.to_config() for part in own] for own in assign(work, size)]


def _remove_replaced(
    runs: Sequence[Run], plan: Sequence[Sequence[Mapping[str, Any]]], out: Path
) -> None:
    """Remove records that would be read together with those that replace them."""
    parts = [Run.from_config(config) for configs in plan for config in configs]
    for run in runs:
        for path in records_to_replace(run, parts, out):
            path.unlink()


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


def _require_new_seeds(runs: Sequence[Run], out: Path) -> None:
    # A part with seeds of another part could not be joined with it. A whole run is different: it
    # uses the recorded parts that have its settings and replaces the others.
    for path in results.record_files(out / "records"):
        recorded = Run.from_config(records.read_header(path).config)
        for run in runs:
            same = replace(recorded, name=run.name, seeds=run.seeds) == run
            seeds = sorted(set(run.seeds) & set(recorded.seeds))
            within = set(recorded.seeds) <= set(run.seeds)
            if same and seeds and not within and run.name != run.whole_name:
                raise RunError(
                    f"{run.name} would repeat seeds {seeds[0]} to {seeds[-1]}, which are recorded "
                    f"in {path}: choose other seeds, or overwrite them"
                )


def _finished(profile: Profile, out: Path) -> list[tuple[Run, timings.Timing]]:
    """Return the finished runs and parts of runs of a folder, and how long they took."""
    found = []
    for timing in timings.load(out).values():
        if (whole := profile.runs.get(whole_name(timing.run))) is not None:
            # The seeds of a part are not known here, only their number.
            seeds = whole.seeds[: max(1, timing.replicas // len(whole.arms))]
            found.append((replace(whole, name=timing.run, seeds=seeds), timing))
    return found


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
