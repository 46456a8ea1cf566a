"""The claims and their verdicts, as `equilibrate reproduce` shows them on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from equilibrate_paper.analysis.judged import ClaimGroup
from equilibrate_paper.output.tables import format_clock, of_the_paper
from equilibrate_paper.runs.timings import Timing

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


def run_time(timings: Sequence[Timing]) -> str:
    """Describe how long all runs took, over all calls of the command.

    >>> run_time([Timing("mlp-grid", 16, 400, 600, 42.656, "NVIDIA H200", "2.11.0", "fp32")])
    '42.7 s, runs of the paper 0.0 s'

    Args:
        timings: The timings of the runs.

    Returns:
        The time of all runs and that of the runs of the paper.
    """
    total, theirs = (sum(t.seconds for t in some) for some in (timings, of_the_paper(timings)))
    return f"{format_clock(total)}, runs of the paper {format_clock(theirs)}"
