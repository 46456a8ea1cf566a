"""Tables of text, and their Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of text with a heading."""

    heading: str
    """Text above the table."""
    columns: Sequence[str]
    """Names of the columns."""
    rows: Sequence[Sequence[str]]
    """Cells, as many in each row as there are columns."""


def to_markdown(tables: Iterable[Table]) -> str:
    r"""Write tables in Markdown, each below its heading.

    >>> print(to_markdown([Table("Size", ("what", "|x|"), [("a", "1")])]))
    ### Size
    <BLANKLINE>
    | what | \|x\| |
    | --- | --- |
    | a | 1 |
    <BLANKLINE>

    Args:
        tables: The tables, in order.

    Returns:
        The Markdown text.
    """
    parts = []
    for table in tables:
        lines = [_line(table.columns), _line(["---"] * len(table.columns))]
        lines += [_line(row) for row in table.rows]
        parts.append(f"### {table.heading}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
