"""The claims and their verdicts, as `equilibrate-paper reproduce` shows them on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from equilibrate_paper.analysis.judged import ClaimGroup

_COLOURS = {
    "holds": "green",
    "fails": "red",
    "undecided": "yellow",
    "not tested at this scale": "yellow",
}


def claim_tables(groups: Sequence[ClaimGroup]) -> Iterator[Table]:
    """Make a table for each group of claims, with the number of each verdict below it.

    Args:
        groups: The groups.

    Yields:
        A table to print on a console.
    """
    for group in groups:
        table = Table(box=box.HORIZONTALS, show_lines=True, expand=True)
        table.caption = " · ".join(
            f"[{_COLOURS[verdict]}]{verdict}: {n}[/]" for verdict, n in group.counts.items()
        )
        table.caption_style = "not dim not italic"
        table.add_column("", min_width=3)
        table.add_column(group.heading, ratio=2)
        table.add_column("Measured")
        table.add_column("Verdict", ratio=1)
        for claim in group.claims:
            remark = f"\n[dim]{escape(claim.remark)}[/]" if claim.remark else ""
            table.add_row(
                claim.figure,
                f"{escape(claim.statement)}\n[dim]{escape(claim.bound)}[/]",
                claim.measured_text,
                f"[{_COLOURS[claim.verdict]}]{claim.verdict}[/]{remark}",
            )
        yield table
