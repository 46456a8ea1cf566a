"""Progress bars on the terminal, the same for every command."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column


def progress_bars(unit: str, console: Console | None = None) -> Progress:
    """Return bars that show a name, how much is done, the remaining time and a status text.

    >>> with progress_bars("epochs", Console(quiet=True)) as bars:
    ...     bar = bars.add_task("mlp", total=10, status="")
    ...     bars.update(bar, completed=3, status="loss 0.2")

    Args:
        unit: What is counted, such as "epochs".
        console: The console to draw on, by default the standard output.

    Returns:
        The bars; use them in a `with` block. Each task needs a field `status`.
    """
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn()]
    columns.append(TextColumn(unit))
    columns.append(TimeRemainingColumn(table_column=Column(min_width=7)))  # never truncated
    rest = Column(ratio=1, no_wrap=True)  # only the status is cut off in a narrow terminal
    columns.append(TextColumn("{task.fields[status]}", table_column=rest))
    return Progress(*columns, console=console, expand=True)
