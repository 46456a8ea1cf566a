"""The message after Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


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
