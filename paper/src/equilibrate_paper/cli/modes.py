"""The options `--resume` and `--overwrite`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing run.")]
Mode = Literal["new", "resume", "overwrite"]


def parse_mode(resume: bool, overwrite: bool) -> Mode:
    """Return what to do with an existing record.

    Args:
        resume: Whether `--resume` was given.
        overwrite: Whether `--overwrite` was given.

    Returns:
        The mode of `records.Writer`.

    Raises:
        ValueError: If both were given.
    """
    if resume and overwrite:
        raise ValueError("--resume and --overwrite cannot be combined: choose one of them")
    return "resume" if resume else "overwrite" if overwrite else "new"
