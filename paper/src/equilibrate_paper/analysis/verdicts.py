"""Compare every claim with the records and give a verdict.

A claim holds if the 95 % interval over seeds lies within its bound, fails if the interval lies
outside, and is undecided if the interval straddles the bound. A claim that a shortened
protocol or another data set can neither confirm nor refute is not tested at this scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from equilibrate.estimates import Estimate
from equilibrate_paper.analysis.bounds import Bound
from equilibrate_paper.analysis.claim import Claim
from equilibrate_paper.analysis.claims import CLAIMS
from equilibrate_paper.analysis.judged import ClaimGroup, JudgedClaim, Verdict
from equilibrate_paper.analysis.results import Result
from equilibrate_paper.protocol.profiles import PROFILES

Results = Mapping[str, Result]

_UNTESTED: Verdict = "not tested at this scale"


def judge(results: Results) -> list[JudgedClaim]:
    """Judge every claim by the records.

    Args:
        results: Results by the names of their runs; runs may be missing.

    Returns:
        All claims, those of the paper first, in the order of the figures. Claims about runs that
        were added later are left out as long as these runs are not recorded.
    """
    known = [c for c in CLAIMS if not c.follow_up or set(c.runs) <= set(results)]
    ordered = sorted(known, key=lambda c: (c.ours, c.figure.startswith("S"), c.figure))
    return [_judge(claim, results) for claim in ordered]


def grouped(
    claims: Sequence[JudgedClaim], panels: Collection[str] | None = None
) -> list[ClaimGroup]:
    """Group claims for display: those of the paper, and ours.

    Args:
        claims: The judged claims.
        panels: Show only claims about these panels; a claim about figure S2 is about S2a to S2d.
            None shows all.

    Returns:
        The groups that are not empty.
    """
    shown = [
        claim
        for claim in claims
        if panels is None or any(panel.startswith(claim.figure) for panel in panels)
    ]
    headings = {False: "Claims of the paper", True: "Claims beyond the paper"}
    groups = [
        ClaimGroup(heading, [claim for claim in shown if claim.ours == ours])
        for ours, heading in headings.items()
    ]
    return [group for group in groups if group.claims]


def _judge(claim: Claim, results: Results) -> JudgedClaim:
    own = [results[name] for name in claim.runs if name in results and len(results[name].epoch)]
    paper_task = PROFILES["paper"].runs[claim.runs[0]].task
    task = own[0].run.task if own else paper_task
    estimate, verdict, remark = _verdict(claim, own)
    measured = None if estimate is None else _rounded(estimate.value)
    margin = None if estimate is None else _rounded(estimate.margin)
    return JudgedClaim(
        id=claim.id,
        figure=claim.figure,
        task=paper_task.name,
        # A general claim is about the task at hand, any other about the paper's own.
        statement=claim.statement_for(task if claim.general else paper_task),
        measured=measured,
        margin=margin,
        bound=claim.bound_for(task),
        why=claim.why_for(task),
        verdict=verdict,
        remark=remark,
        ours=claim.ours,
        short="" if claim.short is None else claim.short.text,
        short_measured=(
            ""
            if claim.short is None or measured is None
            else claim.short.describe(measured, margin)
        ),
    )


def _verdict(claim: Claim, own: Sequence[Result]) -> tuple[Estimate | None, Verdict, str]:
    """Return what was measured, the verdict, and a remark."""
    if len(own) < len(claim.runs):
        missing = set(claim.runs) - {result.run.name for result in own}
        return None, _UNTESTED, f"not run: {', '.join(sorted(missing))}"
    candidates = claim.measure(*own)
    measured = _decisive(candidates, claim.bound, own) if candidates else None
    if measured is None or math.isnan(measured.value):
        return None, _UNTESTED, "the runs are too short to measure it"
    decided = claim.bound.decide(measured, own)
    short = [f"{r.run.name}: {r.shortfall}" for r in own if not r.complete]
    if {r.profile for r in own} != {"paper"} and not claim.general:
        remark = f"measured on {own[0].run.task.data}; the claim is about the paper's own data"
        return measured, _UNTESTED, remark
    # With fewer seeds the interval is wider but still valid; with fewer epochs the state differs.
    if short and not (claim.general and decided and all(r.has_all_epochs for r in own)):
        return measured, _UNTESTED, f"incomplete – {'; '.join(short)}"
    if math.isnan(measured.margin):
        return measured, _UNTESTED, "one seed gives no interval"
    if decided is None:
        remark = "; ".join(["the interval straddles the bound", *short])
        return measured, "undecided", remark
    return measured, "holds" if decided else "fails", "; ".join(short)


def _decisive(candidates: Sequence[Estimate], bound: Bound, own: Sequence[Result]) -> Estimate:
    """Return the estimate that violates the bound most clearly, or else comes nearest to it."""
    violating = [e for e in candidates if bound.decide(e, own) is False]
    if violating:
        return max(violating, key=lambda e: abs(e.value) - e.margin)
    return max(candidates, key=lambda e: abs(e.value) + (0.0 if math.isnan(e.margin) else e.margin))


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
