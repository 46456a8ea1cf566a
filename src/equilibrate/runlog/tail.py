"""Follow a record while another process writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from equilibrate.runlog.records import End, Header, Row, parse_header, parse_row, split_end


@dataclass(frozen=True, slots=True)
class Update:
    """What is new in a record."""

    rows: list[Row]
    """The new rows, complete ones only."""
    restarted: bool
    """Whether earlier rows are no longer valid: the run was overwritten, or resumed from an earlier
    step. `rows` then has all rows of the record."""


class Tail:
    """Reads the rows that were appended to a record since the last call.

    A line that is not complete yet is left for the next call. A record that was replaced, or from
    which rows were removed, is read from its beginning.

    >>> import tempfile
    >>> from equilibrate.runlog.records import Writer
    >>> path = Path(tempfile.mkdtemp()) / "train.jsonl"
    >>> tail = Tail(path)
    >>> tail.poll().rows
    []
    >>> writer = Writer(path, config={})
    >>> writer.write({"step": 1})
    >>> tail.poll().rows
    [{'step': 1}]
    >>> writer.write({"step": 2})
    >>> tail.poll().rows
    [{'step': 2}]
    >>> writer.close()

    Args:
        path: The record. It may not exist yet.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.header: Header | None = None
        """The header of the record; None until it is written."""
        self.end: End | None = None
        """How the run ended; None before."""
        self._offset = 0
        self._lines = 0
        self._last = b""

    def poll(self) -> Update:
        """Read what is new.

        Returns:
            The new rows; none if the file does not exist.

        A file that is not a record, or is damaged, raises a `RecordError`.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset - len(self._last))
                data = file.read()
        except FileNotFoundError:
            return Update([], restarted=self._forget())
        if not data.startswith(self._last):
            self._forget()
            return Update(self.poll().rows, restarted=True)
        complete = data[len(self._last) : data.rfind(b"\n") + 1]
        lines = complete.splitlines(keepends=True)
        if not lines:
            return Update([], False)
        self._offset += len(complete)
        self._last = lines[-1]
        if self.header is None:
            # Not with `read_header`: the file may be another one by now.
            self.header = parse_header(self.path, lines.pop(0))
            self._lines = 1
        first = self._lines + 1
        self._lines += len(lines)
        lines, self.end = split_end(lines)
        return Update([parse_row(self.path, n, line) for n, line in enumerate(lines, first)], False)

    def _forget(self) -> bool:
        """Return whether anything has been read, and start at the beginning."""
        begun = self._offset > 0
        self._offset, self._lines, self._last, self.header, self.end = 0, 0, b"", None, None
        return begun
