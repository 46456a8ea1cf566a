"""Progress bars on the terminal, the same for every command."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
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


class DownloadBar:
    """A progress bar of a download, with the interface that `pooch.HTTPDownloader` expects.

    It is drawn on the standard error while the `with` block runs.

    Args:
        name: The name of the file.
    """

    def __init__(self, name: str) -> None:
        self._progress = Progress(
            "{task.description}",
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(name, total=None)

    def __enter__(self) -> DownloadBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def total(self) -> float | None:
        """Size of the file in bytes, None if unknown."""
        return self._progress.tasks[0].total

    @total.setter
    def total(self, value: int) -> None:
        self._progress.update(self._task, total=value or None)

    def update(self, size: int) -> None:
        """Advance the bar.

        Args:
            size: Number of bytes downloaded since the last call.
        """
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        """Set the bar back to zero."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Draw the final state."""
        self._progress.refresh()
