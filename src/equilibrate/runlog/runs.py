"""Where the record of a run is."""

from __future__ import annotations

from pathlib import Path

from equilibrate.runlog.records import RecordError

NAME = "train.jsonl"
"""Name of the record in the folder of a run."""
_DROPPED = ".dropped.jsonl"


def record_path(run: Path | str) -> Path:
    """Return the file that a run is recorded in.

    >>> record_path("runs/mine").as_posix(), record_path("mine.jsonl").as_posix()
    ('runs/mine/train.jsonl', 'mine.jsonl')

    Args:
        run: A file that ends in `.jsonl`, or a folder.

    Returns:
        The file itself, or `train.jsonl` in the folder.
    """
    run = Path(run)
    return run if run.suffix == ".jsonl" else run / NAME


def dropped_path(record: Path | str) -> Path:
    """Return the file that keeps the rows which resuming has removed from a record.

    >>> dropped_path("runs/mine/train.jsonl").as_posix()
    'runs/mine/train.dropped.jsonl'

    Args:
        record: The record.

    Returns:
        The file next to it.
    """
    return Path(record).with_suffix(_DROPPED)


def find_record(run: Path | str, *, missing_ok: bool = False) -> Path:
    """Find the record of a run.

    Args:
        run: A record, or a folder that contains `train.jsonl` or one other record.
        missing_ok: Whether to return where the record will be if there is none yet.

    Returns:
        The record.

    Raises:
        RecordError: If there is none, or a folder has several.
    """
    path = record_path(run)
    if path.exists():
        return path
    folder = Path(run)
    found = sorted(p for p in folder.glob("*.jsonl") if not p.name.endswith(_DROPPED))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(p.name for p in found)
        raise RecordError(f"{folder} has several records ({names}): name one of them")
    if missing_ok:
        return path
    raise RecordError(
        f"{path} does not exist: record a run with equilibrate.Recorder({str(run)!r}, …), or with "
        "`equilibrate train`"
    )
