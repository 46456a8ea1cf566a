"""Reproduce the paper: execute missing runs, draw the figures and check the claims."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from rich.console import Console

from equilibrate.record import jsonl
from equilibrate_paper.analysis import results
from equilibrate_paper.analysis.judged import JudgedClaim
from equilibrate_paper.data import datasets
from equilibrate_paper.progress import progress_bars
from equilibrate_paper.protocol.panels import PANELS
from equilibrate_paper.protocol.profiles import Profile
from equilibrate_paper.protocol.run import PaperRun
from equilibrate_paper.runs.errors import Diverged, RunError, Unfinished
from equilibrate_paper.runs.execute import execute
from equilibrate_paper.runs.outputs import write_outputs


def reproduce(
    panels: Sequence[str] = (),
    *,
    out: Path | str,
    profile: Profile,
    device: torch.device | str = "cpu",
    data_dir: Path | str | None = None,
    overwrite: bool = False,
    max_minutes: float | None = None,
    console: Console | None = None,
) -> list[JudgedClaim]:
    """Write records, figures, claims.json, tables.md and report.html to a folder.

    Runs that several panels share are executed once. Complete runs are kept, and interrupted runs
    continue.

    Args:
        panels: The panels to draw, by default all that the device can run.
        out: The folder of the reproduction.
        profile: The runs to execute, as given by `profiles.profile`.
        device: The device to train on.
        data_dir: The folder with MNIST and CIFAR-10.
        overwrite: Whether to start all runs again.
        max_minutes: Stop the runs after this time, counted from the call. What they did is saved,
            and the next call continues them. Without it all runs are completed.
        console: The console for progress bars; None shows nothing.

    Returns:
        All claims with their verdicts.

    Raises:
        ValueError: If an argument is invalid.
        Diverged: If a run diverged. The other runs are complete and their figures are drawn.
    """
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise ValueError(f"max_minutes must be positive and finite, got {max_minutes}")
    stop_at = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
    out, device = Path(out), torch.device(device)
    wanted = _panels_for(device, panels, profile)
    with jsonl.open_locked(out / ".lock"):
        _require_profile(out, profile.name, overwrite)
        runs = profile.runs_for(wanted)
        data = {
            name: datasets.load(name, data_dir, progress=console is not None)
            for name in sorted({run.task.data for run in runs})
        }

        def execute_one(run: PaperRun, progress: Callable[[int], None]) -> bool:
            return execute(
                run,
                out,
                data[run.task.data],
                profile=profile.name,
                device=device,
                overwrite=overwrite,
                stop_at=stop_at,
                progress=progress,
            )

        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with on_device, _threads(profile.threads):
            failures = _execute_all(runs, execute_one, stop_at, console or Console(quiet=True))
        if failures:
            with suppress(RunError):  # no run to draw; the failures say why
                write_outputs(out)
            raise Diverged("\n".join(failures))
        return write_outputs(out, panels)


def draw(panels: Sequence[str] = (), *, out: Path | str) -> list[JudgedClaim]:
    """Draw figures and check claims from what is recorded, without running anything.

    Args:
        panels: The panels to draw, by default all whose runs are recorded.
        out: The folder of the reproduction.

    Returns:
        All claims with their verdicts.

    Raises:
        RunError: If the folder does not exist.
    """
    out = Path(out)
    _require_known(panels)
    if not out.is_dir():
        raise RunError(f"{out} does not exist: give the folder of a reproduction, or run it")
    with jsonl.open_locked(out / ".lock"):
        return write_outputs(out, panels)


def _execute_all(
    runs: Sequence[PaperRun],
    execute_one: Callable[[PaperRun, Callable[[int], None]], bool],
    stop_at: float,
    console: Console,
) -> list[str]:
    """Execute runs in order, with progress bars.

    A run that diverges does not stop the others, except those that start from its end.

    Returns:
        A message for each run that diverged or could not start.

    Raises:
        Unfinished: If there is no time left.
    """
    failed: dict[str, str] = {}
    begun = executed = 0
    with progress_bars("epochs", console) as bars:
        total = bars.add_task("all runs", total=sum(run.epochs for run in runs), status="")
        for run in runs:
            bar = bars.add_task(run.name, total=run.epochs, status="")
            first: list[int] = []

            def show(epoch: int, bar=bar, begun=begun, first=first) -> None:
                nonlocal executed
                first.append(epoch)
                executed += epoch > first[0]
                bars.update(bar, completed=epoch)
                bars.update(total, completed=begun + epoch)

            if run.start in failed:
                failed[run.name] = f"{run.name}: not run, because {run.start} diverged"
                continue
            # Every call executes something, so that repeated calls with any limit come to an end.
            in_time = not executed or time.monotonic() < stop_at
            try:
                if not (in_time and execute_one(run, show)):
                    reasons = [
                        *failed.values(),
                        "Stopped at the time limit; what was done is saved",
                    ]
                    raise Unfinished("\n".join(reasons))
            except Diverged as error:
                failed[run.name] = str(error)
            begun += run.epochs
    return list(failed.values())


def _require_known(panels: Sequence[str]) -> None:
    unknown = [panel for panel in panels if panel not in PANELS]
    if unknown:
        raise ValueError(f"figure {unknown[0]!r} is unknown; choose from {', '.join(PANELS)}")


def _panels_for(device: torch.device, panels: Sequence[str], profile: Profile) -> Sequence[str]:
    _require_known(panels)
    absent = [panel for panel in panels if panel not in profile.panels]
    if absent:
        needs = "a GPU and the" if PANELS[absent[0]].gpu else "the"
        raise ValueError(
            f"figure {absent[0]!r} is not part of the profile {profile.name!r}: it needs {needs} "
            "profile 'paper'"
        )
    gpu_only = [panel for panel in profile.panels if PANELS[panel].gpu and device.type != "cuda"]
    impossible = [panel for panel in panels if panel in gpu_only]
    if impossible:
        raise ValueError(
            f"figure {impossible[0]!r} compares precisions that only a GPU has: run it on a GPU"
        )
    return panels or [panel for panel in profile.panels if panel not in gpu_only]


def _require_profile(out: Path, profile: str, overwrite: bool) -> None:
    # A folder has runs of one profile, or figures would mix them. Overwriting removes the others.
    for path in results.record_files(out / "records"):
        other = jsonl.read_header(path).config.get("profile")
        if other == profile:
            continue
        if not overwrite:
            raise RunError(
                f"{out} has results of the profile {other!r}: choose another folder for "
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
