"""The list of claims is complete and consistent."""

import pytest

from equilibrate_paper.analysis.claims import CLAIMS
from equilibrate_paper.analysis.findings import COMPARISONS
from equilibrate_paper.protocol.panels import PANELS
from equilibrate_paper.protocol.profiles import PROFILES

PAPER = PROFILES["paper"].runs


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_claims_refer_to_existing_runs_and_panels(claim):
    assert set(claim.runs) <= set(PAPER)
    assert any(panel.startswith(claim.figure) for panel in PANELS)
    assert {PAPER[run].task.name for run in claim.runs} == {claim.id.rsplit("-", 1)[1]}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_texts_have_no_open_fields(claim):
    task = PAPER[claim.runs[0]].task
    texts = claim.statement_for(task), claim.bound_for(task), claim.why_for(task)
    assert claim.statement_for(task).startswith(task.title)
    assert all(text and "{" not in text and text == text.strip() for text in texts)


def test_both_tasks_share_a_short_text():
    """One row of the summary has the claim about the MLP and that about the CNN."""
    texts = {}
    for claim in CLAIMS:
        texts.setdefault(claim.id.rsplit("-", 1)[0], set()).add(claim.short and claim.short.text)
    assert all(len(found) == 1 for found in texts.values())


def test_every_claim_of_the_paper_but_the_initial_ones_is_in_the_summary():
    shown = {claim.id for claim in CLAIMS if claim.short}
    paper = {claim.id for claim in CLAIMS if not claim.ours}
    assert paper - shown == {"initial-meet-mlp", "initial-meet-cnn"}
    assert shown <= paper


def test_comparisons_of_precisions_are_counted():
    further = {"mlp-tf32", "cnn-tf32", "cnn-fp16"}
    assert further <= set(PAPER)
    assert 2 * len(further) == COMPARISONS


def test_follow_ups_have_the_bound_of_the_first_measurement():
    """The claim of the same name about the first runs, or about the paper's."""
    bound = {claim.id: claim.bound for claim in CLAIMS}
    for task in ("mlp", "cnn"):
        assert bound[f"equal-length-meet-{task}"] == bound[f"unbiased-meet-{task}"]
        assert bound[f"equal-length-lowers-{task}"] == bound[f"shuffling-lowers-{task}"]
    assert bound["equal-length-reshuffled-linear-mlp"] == bound["landscape-linear-mlp"]
    assert bound["equal-length-independent-linear-mlp"] == bound["unbiased-linear-mlp"]
    later = {claim.id for claim in CLAIMS if claim.follow_up}
    assert later == {name for name in bound if name.startswith("equal-length")}
