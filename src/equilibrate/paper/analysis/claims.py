"""Every statement held to the records: what was measured, and the verdict.

A claim is held to a bound by its 95 % interval over seeds: it holds where the interval lies inside
the bound, it fails where the interval lies outside, and it is undecided where the interval
straddles the bound. What a shortened protocol, or another data set, cannot refute or confirm is
said to be not tested at this scale.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from equilibrate.paper.analysis.findings import Finding
from equilibrate.paper.analysis.results import Result
from equilibrate.paper.analysis.statements import STATEMENTS, Statement
from equilibrate.paper.protocol.profiles import PROFILES

Verdict = Literal["holds", "fails", "undecided", "not tested at this scale"]
Results = Mapping[str, Result]


@dataclass(frozen=True)
class Claim:
    """What is said, what was measured, the bound it is held to and why, and the verdict."""

    id: str
    figure: str
    statement: str
    measured: float | None
    """None where nothing was measured."""
    error: float | None
    """Half the 95 % interval over seeds; None with fewer than two."""
    bound: str
    why: str
    verdict: Verdict
    remark: str
    ours: bool
    """Whether it goes beyond the paper."""


def check(results: Results) -> list[Claim]:
    """Hold every claim to the records, the paper's first; one that lacks its runs is not tested."""
    ordered = sorted(STATEMENTS, key=lambda s: (s.ours, s.figure.startswith("S"), s.figure))
    return [_hold(statement, results) for statement in ordered]


def about(claims: Sequence[Claim], panels: Collection[str]) -> list[Claim]:
    """Those of the claims that speak of some panels; a claim of figure S2 speaks of S2a to S2d."""
    return [c for c in claims if any(panel.startswith(c.figure) for panel in panels)]


def save(claims: list[Claim], path: Path | str) -> None:
    """Write a list of objects with the fields of `Claim`."""
    text = json.dumps([asdict(claim) for claim in claims], indent=1, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _hold(s: Statement, results: Results) -> Claim:
    mine = [results[name] for name in s.runs if name in results and len(results[name].epoch)]
    # A general claim is about the task at hand, any other about the paper's own.
    own = mine[0].run.task if mine and s.general else PROFILES["paper"].runs[s.runs[0]].task
    statement = s.statement.format(title=own.title)

    def claim(finding: Finding | None, verdict: Verdict, remark: str) -> Claim:
        measured = error = None
        if finding is not None:
            measured = _number(finding.measured.mean)
            error = _number(finding.measured.half_width)
        return Claim(
            s.id, s.figure, statement, measured, error, s.bound, s.why, verdict, remark, s.ours
        )

    if len(mine) < len(s.runs):
        missing = set(s.runs) - {result.run.name for result in mine}
        remark = f"not run: {', '.join(sorted(missing))}"
        return claim(None, "not tested at this scale", remark)
    finding = s.measure(*mine)
    if finding is None or math.isnan(finding.measured.mean):
        return claim(None, "not tested at this scale", "the runs at hand do not reach it")
    decided = finding.bound.decides(finding.measured)
    elsewhere = {r.profile for r in mine} != {"paper"}
    short = [f"{r.run.name}: {r.shortfall}" for r in mine if not r.whole]
    if elsewhere and not s.general:
        remark = f"measured on {mine[0].run.task.data}; the claim is about the paper's own data"
        return claim(finding, "not tested at this scale", remark)
    # Fewer seeds widen the interval, which decides all the same; fewer epochs show another state.
    if short and not (s.general and decided and all(r.has_all_epochs for r in mine)):
        return claim(finding, "not tested at this scale", f"incomplete – {'; '.join(short)}")
    if math.isnan(finding.measured.half_width):
        return claim(finding, "not tested at this scale", "one seed gives no interval")
    if decided is None:
        return claim(finding, "undecided", "; ".join(["the interval straddles the bound", *short]))
    return claim(finding, "holds" if decided else "fails", "; ".join(short))


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
