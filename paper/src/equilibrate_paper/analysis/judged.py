"""Judged claims as people see them: one view for the terminal, HTML, Markdown and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from equilibrate.record import jsonl
from equilibrate.report.numbers import format_number

Verdict = Literal["holds", "fails", "undecided", "not tested at this scale"]


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with what was measured, the bound it was compared with, and the verdict."""

    id: str
    """Unique name."""
    figure: str
    """Figure, or panel of a figure, that shows it."""
    task: str
    """Short name of the model and data that it is about."""
    statement: str
    """What is claimed."""
    measured: float | None
    """Measured value; None if nothing was measured."""
    margin: float | None
    """Half the width of the confidence interval of `measured`; None with fewer than two seeds."""
    bound: str
    """Bound on `measured` within which the claim holds."""
    why: str
    """Reason for the bound."""
    verdict: Verdict
    """Outcome of the comparison."""
    remark: str
    """Reason for an open verdict, or what was missing; may be empty."""
    ours: bool
    """Whether the claim is not made in the paper."""
    short: str = ""
    """The claim in a few words, for a summary; empty if it is not part of one."""
    short_measured: str = ""
    """What was measured in a few words; empty like `short`, or if nothing was measured."""

    @property
    def measured_text(self) -> str:
        """Measured value with its margin, as text."""
        return format_number(self.measured, self.margin)


@dataclass(frozen=True)
class ClaimGroup:
    """Claims below one heading."""

    heading: str
    """Text above the claims."""
    claims: Sequence[JudgedClaim]
    """The claims, in order."""

    @property
    def counts(self) -> dict[Verdict, int]:
        """Number of claims with each verdict that occurs, by verdict in alphabetical order."""
        counts: Counter[Verdict] = Counter(claim.verdict for claim in self.claims)
        return dict(sorted(counts.items()))


def save(claims: Sequence[JudgedClaim], path: Path | str) -> None:
    """Write claims to a JSON file: a list of objects with the fields of `JudgedClaim`.

    Args:
        claims: The claims.
        path: The file to write.
    """
    text = json.dumps([asdict(claim) for claim in claims], indent=1, ensure_ascii=False)
    jsonl.write_file(path, text + "\n")


def load(path: Path | str) -> list[JudgedClaim]:
    """Read the claims that `save` wrote.

    Args:
        path: The file to read.

    Returns:
        The claims.
    """
    return [JudgedClaim(**item) for item in json.loads(Path(path).read_text(encoding="utf-8"))]
