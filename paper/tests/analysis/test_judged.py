"""The view of judged claims: its file, its counts and its texts."""

from paper_support.judged import judged_claim

from equilibrate_paper.analysis import judged
from equilibrate_paper.analysis.judged import ClaimGroup

CLAIM = judged_claim()


def test_saved_claims_are_loaded_again(tmp_path):
    saved = [CLAIM, judged_claim(measured=None, margin=None, short="η → 0", short_measured="1 %")]
    judged.save(saved, tmp_path / "claims.json")
    assert judged.load(tmp_path / "claims.json") == saved
    assert "η → 0" in (tmp_path / "claims.json").read_text(encoding="utf-8")


def test_a_group_counts_its_verdicts():
    group = ClaimGroup(
        "All", [CLAIM, judged_claim(verdict="undecided"), judged_claim(verdict="fails"), CLAIM]
    )
    assert list(group.counts.items()) == [("fails", 1), ("holds", 2), ("undecided", 1)]


def test_the_measured_value_is_shown_with_its_margin():
    assert CLAIM.measured_text == "0.0123 ± 0.0021"
    assert judged_claim(measured=None, margin=None).measured_text == "–"
