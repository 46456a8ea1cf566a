"""Claims on a terminal."""

import io

from paper_support.judged import judged_claim
from rich.console import Console

from equilibrate_paper.analysis.judged import ClaimGroup
from equilibrate_paper.output import terminal

CLAIM = judged_claim(
    statement="The sides [meet].",
    bound="|L/R − 1| < 0.05 [at the end]",
    remark="2 of 4 [seeds]",
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
