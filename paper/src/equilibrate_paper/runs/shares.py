"""Which seeds of which runs are still missing, and which rank executes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from equilibrate.runlog import records
from equilibrate_paper.protocol.run import Run
from equilibrate_paper.runs.folder import part_paths, record_path


def missing_parts(run: Run, out: Path, count: int) -> list[Run]:
    """Return what must be executed to complete a run.

    A recorded whole run is continued as it is. Recorded parts keep their seeds: those that are
    not finished are continued, and the other seeds are distributed.

    Args:
        run: The run, possibly a part of a run.
        out: The folder of the reproduction.
        count: Number of parts into which the seeds without a record are cut.

    Returns:
        The run itself, or parts of it; nothing if its recorded parts are all finished.
    """
    recorded = _recorded_parts(run, out)
    unfinished = [part for part in recorded if epochs_done(part, out) < part.epochs]
    taken = {seed for part in recorded for seed in part.seeds}
    seeds = [seed for seed in run.seeds if seed not in taken]
    if not unfinished and not seeds:
        return []
    whole = record_path(out, run.name)
    if whole.exists() and whole.stat().st_size:
        return [run]
    return [*unfinished, *cut(run, seeds, count)]


def cut(run: Run, seeds: Sequence[int], count: int) -> Iterator[Run]:
    """Cut some seeds of a run into parts of nearly equal size.

    Args:
        run: The run.
        seeds: The seeds to cut, in the order of the run.
        count: Number of parts. If there are fewer seeds, they are not distributed.

    Yields:
        The parts; the run itself for a part that has all seeds. There are more parts than `count`
        if the seeds have gaps.
    """
    count = count if len(seeds) >= count else 1
    for index in range(count):
        share = seeds[len(seeds) * index // count : len(seeds) * (index + 1) // count]
        for inside, group in groupby(run.seeds, key=set(share).__contains__):
            if inside:
                own = tuple(group)
                yield run if own == run.seeds else run.part(own[0], own[-1])


def assign(parts: Iterable[tuple[Run, float]], size: int) -> list[list[Run]]:
    """Distribute parts over ranks so that each has about the same work.

    Work is the number of remaining epochs times the number of replicas. It is compared within each
    task first, because an epoch of one task may take many times as long as one of another task.
    Runs that start from another run are distributed separately: they begin when all others are
    complete.

    Args:
        parts: The parts in the order in which they are executed, each with the number of its
            remaining epochs.
        size: Number of ranks.

    Returns:
        The parts of each rank, in the same order.
    """
    work: Counter[tuple[bool, str, int]] = Counter()
    total: Counter[tuple[bool, int]] = Counter()
    assigned: list[list[Run]] = [[] for _ in range(size)]
    for part, epochs in parts:
        later, task = part.start is not None, part.task.name
        loads = [(work[later, task, rank], total[later, rank]) for rank in range(size)]
        rank = loads.index(min(loads))
        amount = round(epochs * len(part.replicas))
        work[later, task, rank] += amount
        total[later, rank] += amount
        assigned[rank].append(part)
    return assigned


def epochs_done(part: Run, out: Path) -> float:
    """Return the number of recorded epochs of a run or part.

    Args:
        part: The run or part.
        out: The folder of the reproduction.
    """
    path = record_path(out, part.name)
    rows = records.read(path).rows if path.exists() and path.stat().st_size else []
    return rows[-1]["epoch"] if rows else 0


def records_to_replace(run: Run, parts: Sequence[Run], out: Path) -> list[Path]:
    """Return the records that must be removed before a run is executed again.

    Args:
        run: The run, possibly a part of a run.
        parts: The parts into which it is cut. Their own records are not returned.
        out: The folder of the reproduction.
    """
    names = {part.name for part in parts}
    paths = [record_path(out, run.whole_name), *part_paths(out, run.whole_name)]
    return [
        path
        for path in paths
        if path.exists()
        and path.stem not in names
        and (run.name == run.whole_name or _seeds(path) <= set(run.seeds))
    ]


def _recorded_parts(run: Run, out: Path) -> list[Run]:
    """Return the recorded parts with seeds of a run and otherwise the same settings."""
    found = []
    for path in part_paths(out, run.whole_name):
        if path.stat().st_size and path.stem != run.name:
            part = Run.from_config(records.read_header(path).config)
            same = replace(part, name=run.name, seeds=run.seeds) == run
            if same and set(part.seeds) <= set(run.seeds):
                found.append(part)
    return found


def _seeds(path: Path) -> set[int]:
    return set(records.read_header(path).config["seeds"]) if path.stat().st_size else set()
