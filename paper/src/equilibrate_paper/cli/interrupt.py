"""The messages after Ctrl-C and at a time limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from equilibrate_paper.runs.errors import Unfinished

UNFINISHED = 3
"""Exit code of a command that stopped at its time limit."""


@contextmanager
def interrupt_message(console: Console, hint: str) -> Iterator[None]:
    """Print how to continue if the `with` block is interrupted by Ctrl-C.

    Args:
        console: The console to print to.
        hint: How to continue.

    Yields:
        Nothing.

    Raises:
        KeyboardInterrupt: After the message is printed.
    """
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"Interrupted. {hint}")
        raise


@contextmanager
def exit_if_unfinished(console: Console, hint: str, *, quiet: bool = False) -> Iterator[None]:
    """Print what is left and how to continue if the `with` block stopped at its time limit.

    Args:
        console: The console to print to.
        hint: How to continue.
        quiet: Whether to print nothing.

    Yields:
        Nothing.

    Raises:
        Exit: With the code 3, after the message is printed.
    """
    try:
        yield
    except Unfinished as error:
        if not quiet:
            console.print(f"{error}. {hint}", highlight=False)
        raise typer.Exit(UNFINISHED) from error
