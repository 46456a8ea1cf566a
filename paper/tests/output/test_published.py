"""Published records, claims, tables, figures, README and documentation agree."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from equilibrate.report.numbers import format_estimate, format_number
from equilibrate_paper.analysis import findings, judged, measures, results, shuffling, verdicts
from equilibrate_paper.analysis.seeds import mean_over_seeds, ratio_over_seeds
from equilibrate_paper.output import tables
from equilibrate_paper.output.markdown import to_markdown
from equilibrate_paper.protocol.panels import PANELS

ROOT = Path(__file__).parents[3]
PAPER = ROOT / "paper" / "results"
REDRAW = "run equilibrate-paper reproduce --profile paper --draw-only --out paper/results"


@pytest.fixture(scope="module")
def recorded():
    return results.load(PAPER / "records")


@pytest.fixture(scope="module")
def published():
    return judged.load(PAPER / "claims.json")


def test_claims_agree_with_the_records(recorded, published):
    for now, then in zip(verdicts.judge(recorded), published, strict=True):
        for name, value in asdict(now).items():
            expected = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert getattr(then, name) == expected, f"{now.id}, {name}: {REDRAW}"


def test_tables_agree_with_the_records(recorded, published):
    numbers = tables.numbers(recorded)
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
    fit = shuffling.fit_runs(*both)
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


def test_the_results_quote_the_comparison_of_the_cnn(recorded):
    both = recorded["cnn-sequence"], recorded["cnn-unbiased"]
    quotes = []
    for low, high in ((0.0005, 0.005), (0.0001, 0.05)):
        (effect,) = findings.shuffling_effect_between(low, high)(*both)
        quotes.append(format_estimate(effect.scaled(100)) + " %")
    for result in both:
        smallest = measures.finished(result)[-1]
        quotes.append(format_estimate(mean_over_seeds(smallest.last("loss"))))
    phases = measures.finished(both[0])
    changes = [measures.later_change(phase, "right") for phase in phases]
    quotes.append(f"up to {100 * max(change.value for change in changes):.1f} %")
    resolved = [change for change in changes if change.value > change.margin]
    assert (len(resolved), len(changes)) == (7, 11)
    quotes.append("seven of eleven η")
    below = [found for found in findings.residuals(both[0]) if found.value < -found.margin]
    assert len(below) == 3
    quotes.append("at three η")
    seed_zero = measures.accuracy(recorded["cnn-schedules"], "adaptive", measures.END)[0]
    quotes.append(f"at {100 * seed_zero:.1f} % in figure 4")
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    assert [quote for quote in quotes if quote not in page] == []


def test_the_results_quote_the_comparison_of_the_cnn_at_equal_length(recorded):
    names = ("cnn-sequence", "cnn-unbiased", "cnn-independent")
    sequence, short, long = (recorded[name] for name in names)
    part, whole = ((0.0005, 0.005), (0.0001, 0.05))
    pairs = ((sequence, long), (long, short))
    effects = [
        findings.shuffling_effect_between(*lrs)(*both) for both in pairs for lrs in (part, whole)
    ]
    effects += [findings.shuffling_effect(sequence, long), findings.departure_at(0.001)(long)]
    quotes = [format_estimate(effect.scaled(100)) + " %" for (effect,) in effects]
    furthest = max(findings.residuals(long), key=lambda found: abs(found.value) + found.margin)
    quotes.append(format_estimate(furthest.scaled(100)) + " %")
    quotes.append(format_estimate(mean_over_seeds(measures.finished(long)[-1].last("loss"))))
    spreads = []
    for result in (long, short):
        lrs, values = measures.landscape(result)
        inside = (lrs > 0.99 * part[0]) & (lrs < 1.01 * part[1])
        seeds = values[inside].mean(0)
        spreads.append(f"{100 * seeds.std(ddof=1) / seeds.mean():.0f} %")
    quotes.append(" instead of ".join(spreads))
    lower = [
        before.last("loss").mean() - after.last("loss").mean()
        for before, after in zip(measures.finished(sequence), measures.finished(long), strict=True)
    ][:4]
    quotes.append(f"by {min(lower):.3f} to {max(lower):.3f}")
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
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
