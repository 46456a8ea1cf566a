"""Published records, claims, tables, figures, README and documentation agree."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from equilibrate.paper.analysis import measures, results, shuffling, verdicts
from equilibrate.paper.analysis.seeds import ratio_over_seeds
from equilibrate.paper.output import tables
from equilibrate.paper.protocol.panels import PANELS
from equilibrate.paper.runs import timings
from equilibrate.report import claims
from equilibrate.report.numbers import format_estimate, format_number
from equilibrate.report.tables import to_markdown

ROOT = Path(__file__).parents[3]
PAPER = ROOT / "results" / "paper"
REDRAW = "run equilibrate reproduce --profile paper --draw-only --out results/paper"


@pytest.fixture(scope="module")
def recorded():
    return results.load(PAPER / "records")


@pytest.fixture(scope="module")
def published():
    return claims.load(PAPER / "claims.json")


def test_claims_agree_with_the_records(recorded, published):
    for now, then in zip(verdicts.judge(recorded), published, strict=True):
        for name, value in asdict(now).items():
            expected = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert getattr(then, name) == expected, f"{now.id}, {name}: {REDRAW}"


def test_tables_agree_with_the_records(recorded, published):
    numbers = tables.numbers(recorded, timings.load(PAPER).values())
    listed = [tables.claim_table(group) for group in verdicts.grouped(published)]
    text = to_markdown([tables.summary(published), *listed, *numbers])
    assert (PAPER / "tables.md").read_text() == text, REDRAW


def outcomes(rows):
    """Verdicts and numbers of each row, without the words around them."""
    pattern = r"^holds|^fails|^undecided|^not|^–|[−\d.]*\d"
    return [(row[0], *(re.findall(pattern, cell) for cell in row[2:])) for row in rows]


def test_the_readme_has_the_verdicts_and_numbers_of_the_claims(published):
    """Its wording is free; the rows are those of the summary, in order."""
    summary = tables.summary(published)
    lines = (ROOT / "README.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    rows = [row for row in cells if len(row) == 4 and re.fullmatch(r"S?\d", row[0])]
    text = to_markdown([summary])
    assert outcomes(rows) == outcomes(summary.rows), "put this table into README.md:\n" + text


def test_pages_quote_the_second_measurement_of_linearity(published):
    found = {claim.id: claim for claim in published}
    for batches in ("reshuffled", "independent"):
        claim = found[f"equal-length-{batches}-linear-mlp"]
        assert claim.measured is not None
        assert claim.margin is not None
        quoted = format_number(100 * claim.measured, 100 * claim.margin) + " %"
        for page in ("README.md", "docs/results.md"):
            assert quoted in (ROOT / page).read_text(), f"{page} must state {quoted}"


def test_the_results_quote_changes_and_curvature(recorded):
    both = recorded["mlp-reshuffled"], recorded["mlp-independent"]
    fit = shuffling.compared(*both)
    assert fit is not None
    quotes = [
        f"h = {fit.curvature:.1f} ({fit.low:.1f} to {fit.high:.1f})",
        f"χ² = {fit.chi_square:.1f} with {fit.dof} degrees of freedom",
    ]
    for result in both:
        quotes.append(format_estimate(measures.landscape_change(result).scaled(100)) + " %")
    phase = both[1].phases()[-1]
    later, earlier = phase.last("landscape"), measures.halfway(phase, "landscape")
    quotes.append(format_estimate(ratio_over_seeds(later, earlier).shifted(-1).scaled(100)) + " %")
    page = (ROOT / "docs" / "results.md").read_text()
    assert [quote for quote in quotes if quote not in page] == []


def test_every_panel_with_records_is_published_and_shown(recorded):
    drawable = {p.id for p in PANELS.values() if set(p.runs) <= set(recorded)}
    for kind in ("png", "svg"):
        assert {path.stem for path in (PAPER / "figures").glob(f"*.{kind}")} == {
            f"fig{panel}" for panel in drawable
        }, REDRAW
    page = (ROOT / "docs" / "results.md").read_text()
    assert set(re.findall(r"\(figures/paper/fig(\w+)\.png\)", page)) == drawable
    for path in (PAPER / "figures").glob("*.png"):
        copy = ROOT / "docs" / "figures" / "paper" / path.name
        assert copy.read_bytes() == path.read_bytes(), f"copy {path} to {copy}"
