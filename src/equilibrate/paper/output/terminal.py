"""What `equilibrate reproduce` shows on a terminal: bars, and claims with their verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from equilibrate.paper.analysis.claims import Claim, about
from equilibrate.report import page as report

_COLOURS = {
    "holds": "green",
    "fails": "red",
    "undecided": "yellow",
    "not tested at this scale": "yellow",
}


def bars(console: Console) -> Progress:
    """A bar for each run, with its epochs and the time left."""
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "epochs")
    return Progress(*columns, TextColumn("{task.fields[left]}"), console=console)


def claims(found: Sequence[Claim], panels: Collection[str]) -> Iterator[Table]:
    """The claims about `panels`, the paper's and ours, with how many hold below each."""
    for ours, title in ((False, "Claims of the paper"), (True, "Claims beyond the paper")):
        group = [claim for claim in about(found, panels) if claim.ours == ours]
        if not group:
            continue
        counts = sorted(Counter(claim.verdict for claim in group).items())
        tally = " · ".join(f"[{_COLOURS[verdict]}]{verdict}: {n}[/]" for verdict, n in counts)
        table = Table(box=box.HORIZONTALS, show_lines=True, expand=True)
        table.caption, table.caption_style = tally, "not dim not italic"
        table.add_column("", min_width=3)
        table.add_column(title, ratio=2)
        table.add_column("Measured")
        table.add_column("Verdict", ratio=1)
        for claim in group:
            remark = f"\n[dim]{claim.remark}[/]" if claim.remark else ""
            table.add_row(
                claim.figure,
                f"{claim.statement}\n[dim]{claim.bound}[/]",
                report.number(claim.measured, claim.error),
                f"[{_COLOURS[claim.verdict]}]{claim.verdict}[/]{remark}",
            )
        yield table
