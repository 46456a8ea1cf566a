"""Reproduce the paper: execute missing runs, draw the figures and check the claims."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from rich.console import Console

from equilibrate.runlog.files import WriteError
from equilibrate.runlog.lock import lock
from equilibrate_paper.analysis.judged import JudgedClaim
from equilibrate_paper.protocol import profiles
from equilibrate_paper.protocol.panels import PANELS
from equilibrate_paper.protocol.profiles import Profile
from equilibrate_paper.runs.errors import Diverged, RunError, Unfinished
from equilibrate_paper.runs.eta import format_eta
from equilibrate_paper.runs.missing import Outcome, run_missing
from equilibrate_paper.runs.outputs import write_outputs
from equilibrate_paper.runs.ranks import Ranks


def reproduce(
    panels: Sequence[str] = (),
    *,
    out: Path | str,
    profile: str = "quick",
    device: torch.device | str = "cpu",
    data_dir: Path | str | None = None,
    epochs_scale: float = 1.0,
    seeds: int | None = None,
    part: str | None = None,
    overwrite: bool = False,
    draw_only: bool = False,
    max_minutes: float | None = None,
    console: Console | None = None,
    ranks: Ranks | None = None,
) -> list[JudgedClaim]:
    """Write records, figures, claims.json, tables.md and report.html to a folder.

    Runs that several panels share are executed once. Complete runs are kept, and interrupted runs
    continue.

    Several processes can do this together, each with its own `ranks` and otherwise the same
    arguments except for the device. Each executes some of the seeds of every run. Rank 0 locks the
    folder, shows the progress of its own runs, and writes figures, claims and the report.

    Args:
        panels: The panels to draw, by default all that the device can run.
        out: The folder of the reproduction.
        profile: "quick" (digits, minutes) or "paper" (MNIST and CIFAR-10, full size).
        device: The device to train on.
        data_dir: The folder with MNIST and CIFAR-10.
        epochs_scale: Fraction of the epochs of each run, in (0, 1].
        seeds: Maximum number of seeds of each run; None keeps all.
        part: Execute only these seeds of one run, as "RUN:FIRST-LAST".
        overwrite: Whether to start all runs again.
        draw_only: Whether to draw what is recorded without running anything.
        max_minutes: Stop the runs after this time, counted from the call. What they did is saved,
            and the next call continues them. Without it all runs are completed.
        console: The console for progress bars and warnings; None shows nothing.
        ranks: The place of this process among several, as given by `ranks.connect`; None for a
            single process.

    Returns:
        All claims with their verdicts.

    Raises:
        ValueError: If an argument is invalid or contradicts another one.
        RunError: If `out` cannot be used.
        Diverged: If a run diverged. The other runs are complete and their figures are drawn.
        Unfinished: If the runs stopped after `max_minutes`. Nothing is drawn.
    """
    stop_at = _stop_at(max_minutes)
    out, device = Path(out), torch.device(device)
    console, ranks = console or Console(quiet=True), ranks or Ranks()
    plan = _plan(panels, profile, epochs_scale, seeds, part)
    if draw_only and overwrite:
        raise ValueError("draw_only and overwrite cannot be combined: choose one of them")
    if draw_only:
        if not out.is_dir():
            raise RunError(f"{out} does not exist: give the folder of a reproduction, or run it")
        with _disk_errors(out), _locked(out, ranks), _warnings_to(console):
            return ranks.first(lambda: write_outputs(out, panels))
    wanted = _panels_for(device, panels, plan)
    with _disk_errors(out), _locked(out, ranks), _warnings_to(console):
        outcome = run_missing(
            plan,
            wanted,
            out,
            device=device,
            data_dir=data_dir,
            overwrite=overwrite,
            console=console if ranks.rank == 0 else Console(quiet=True),
            ranks=ranks,
            stop_at=stop_at,
        )
        if outcome.epochs_left:
            raise Unfinished("\n".join([*outcome.failures, _what_is_left(outcome)]))
        if outcome.failures:
            with suppress(RunError):  # no run to draw; the failures say why
                ranks.first(lambda: write_outputs(out))
            raise Diverged("\n".join(outcome.failures))
        return ranks.first(lambda: write_outputs(out, panels))


def _stop_at(max_minutes: float | None) -> float:
    if max_minutes is None:
        return math.inf
    if not 0 < max_minutes < math.inf:
        raise ValueError(f"max_minutes must be positive and finite, got {max_minutes}")
    return time.monotonic() + 60 * max_minutes


def _what_is_left(outcome: Outcome) -> str:
    eta = format_eta(outcome.seconds_left)
    left = f"about {eta}" if eta else "for a time that is not known yet"
    return (
        f"Stopped at the time limit; what was done is saved. {outcome.epochs_left} epochs remain, "
        f"{left}"
    )


def _plan(
    panels: Sequence[str], profile: str, epochs_scale: float, seeds: int | None, part: str | None
) -> Profile:
    unknown = [panel for panel in panels if panel not in PANELS]
    if unknown:
        raise ValueError(f"figure {unknown[0]!r} is unknown; choose from {', '.join(PANELS)}")
    plan = profiles.profile(profile, epochs_scale, seeds)
    absent = [panel for panel in panels if panel not in plan.panels]
    if absent:
        needs = "a GPU and the" if PANELS[absent[0]].gpu else "the"
        raise ValueError(
            f"figure {absent[0]!r} is not part of the profile {profile!r}: it needs {needs} "
            "profile 'paper'"
        )
    if part is None:
        return plan
    plan = plan.with_part(part)
    name = part.partition(":")[0]
    wanted = panels or plan.panels
    if plan.runs[name] not in plan.runs_for(wanted):
        raise ValueError(
            f"part={part!r} has no effect, because {', '.join(wanted)} does not need {name}: "
            "choose a figure that needs it, or all figures"
        )
    return plan


def _panels_for(device: torch.device, panels: Sequence[str], plan: Profile) -> Sequence[str]:
    gpu_only = [panel for panel in plan.panels if PANELS[panel].gpu and device.type != "cuda"]
    impossible = [panel for panel in panels if panel in gpu_only]
    if impossible:
        raise ValueError(
            f"figure {impossible[0]!r} compares precisions that only a GPU has: run it on a GPU"
        )
    return panels or [panel for panel in plan.panels if panel not in gpu_only]


@contextmanager
def _locked(out: Path, ranks: Ranks) -> Iterator[None]:
    # Rank 0 holds the lock for all ranks.
    with ExitStack() as stack:
        ranks.first(lambda: stack.enter_context(lock(out)))
        yield


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except WriteError as error:
        raise RunError(
            f"{error}. The recorded rows are safe: run the same command again"
        ) from error
    except OSError as error:
        raise RunError(
            f"cannot write to {out} ({error.strerror or error}); the recorded rows are safe: free "
            "some space or check the permissions, and run the same command again"
        ) from error


@contextmanager
def _warnings_to(console: Console) -> Iterator[None]:
    # Warnings, of a damaged checkpoint for example, are printed above the progress bars.
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: console.print(str(message), style="yellow")
        yield
