"""Claims on a terminal."""

import io

from rich.console import Console

from equilibrate.paper.output import terminal
from equilibrate.report.claims import ClaimGroup, JudgedClaim

CLAIM = JudgedClaim(
    id="meet-mlp",
    figure="1a",
    task="mlp",
    statement="The sides [meet].",
    measured=0.0123,
    margin=0.0021,
    bound="|L/R − 1| < 0.05 [at the end]",
    why="The width of a line.",
    verdict="holds",
    remark="2 of 4 [seeds]",
    ours=False,
)


def test_claims_are_printed_as_they_are():
    """Text in square brackets is not markup."""
    console = Console(file=io.StringIO(), width=160)
    for table in terminal.claim_tables([ClaimGroup("Claims", [CLAIM])]):
        console.print(table)
    text = console.file.getvalue()
    for part in ("Claims", "1a", CLAIM.statement, CLAIM.bound, CLAIM.remark, "0.0123 ± 0.0021"):
        assert part in text
    assert "holds: 1" in text
