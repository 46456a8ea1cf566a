"""The command line: `equilibrate …` or `python -m equilibrate …`."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import equilibrate
from equilibrate.record import jsonl
from equilibrate.report import live, page
from equilibrate.report.run import find_record, load

_ALTERNATE_SCREEN, _BACK, _CLEAR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H\x1b[J"
_REST = 20
"""Reading a record takes at most about one part in this many of the time."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: The arguments; by default those of the process.
    """
    parser = argparse.ArgumentParser("equilibrate", description="Show a recorded training run.")
    parser.add_argument("--version", action="version", version=equilibrate.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = "folder of a run, or its record (a file that ends in .jsonl)"

    command = commands.add_parser("report", help="make an interactive HTML page of a run")
    command.add_argument("run", type=Path, help=run)
    command.add_argument("--out", type=Path, help="file to write (default: RUN/report.html)")
    command.add_argument("--title", help="title of the page (default: name of the run)")
    command.set_defaults(action=report)

    command = commands.add_parser("watch", help="show a run in the terminal while it trains")
    command.add_argument("run", type=Path, help=f"{run}; it may not exist yet")
    command.add_argument(
        "--interval", type=_seconds, default=1.0, help="seconds between two looks (default: 1)"
    )
    command.add_argument("--once", action="store_true", help="show the present state and exit")
    command.set_defaults(action=watch)

    options = vars(parser.parse_args(arguments))
    action = options.pop("action")
    try:
        action(**options)
    except jsonl.RecordError as error:
        sys.exit(f"equilibrate: {error}")
    except RecursionError:
        sys.exit(f"equilibrate: {options['run']} has values that are nested too deeply to be shown")
    except KeyboardInterrupt:
        sys.exit(130)


def report(run: Path, out: Path | None = None, title: str | None = None) -> None:
    """Make an HTML page from the record of a run. The run need not have ended.

    Args:
        run: Folder of the run, or its record.
        out: File to write.
        title: Title of the page.

    Raises:
        RecordError: If there is nothing to show, or the page cannot be written.
    """
    record = find_record(run)
    if (found := load(record, title)) is None:
        raise jsonl.RecordError(f"{record} has no rows yet: wait for the first one")
    if out is None:
        out = record.with_name("report.html") if run.is_dir() else record.with_suffix(".html")
    _print(f"report  {jsonl.write_file(out, page.render(found))}\n")


def watch(run: Path, interval: float = 1.0, once: bool = False) -> None:
    """Show a run in the terminal until it ends. The training does not notice it.

    Args:
        run: Folder of the run, or its record.
        interval: Seconds between two looks at the record.
        once: Whether to look once.
    """
    terminal = sys.stdout.isatty() and not once
    text, ended, seen = _look(find_record(run, missing_ok=not once))
    try:
        _print(_ALTERNATE_SCREEN if terminal else "")
        while not (once or ended):
            if terminal:
                _print(_CLEAR + text)
            time.sleep(max(interval, _REST * seen))
            text, ended, seen = _look(find_record(run, missing_ok=True))
    except KeyboardInterrupt:
        pass
    finally:
        _print(_BACK if terminal else "")
    _print(text)


def _print(text: str) -> None:
    """Print a text with the characters that the terminal has."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = live.in_ascii(text).encode(encoding, "backslashreplace").decode(encoding)
    print(text, end="", flush=True)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of seconds, at least 0, got {text}")


def _look(record: Path) -> tuple[str, bool, float]:
    """Return what there is to see, whether the run has ended, and how long it took to read it."""
    began = time.monotonic()
    if not record.exists():
        return f"Waiting for {record} …\n", False, 0.0
    if (run := load(record)) is None:
        return f"{record} has no rows yet …\n", False, 0.0
    age = time.time() - record.stat().st_mtime
    width = shutil.get_terminal_size().columns
    text = live.view(run, width=width, age=age, colours=sys.stdout.isatty())
    return text, run.end is not None, time.monotonic() - began
