"""What is published agrees: records, claims, tables, figures, README and documentation."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from equilibrate.paper.analysis import claims, results
from equilibrate.paper.analysis.claims import Claim
from equilibrate.paper.output import tables
from equilibrate.paper.protocol.panels import PANELS
from equilibrate.paper.protocol.profiles import PROFILES
from equilibrate.paper.runs import timings

ROOT = Path(__file__).parents[3]
PAPER = ROOT / "results" / "paper"
REDRAW = "run equilibrate reproduce --profile paper --draw-only --out results/paper"


@pytest.fixture(scope="module")
def recorded():
    return results.load(PAPER / "records")


@pytest.fixture(scope="module")
def published():
    return [Claim(**claim) for claim in json.loads((PAPER / "claims.json").read_text())]


def test_claims_are_those_of_the_records(recorded, published):
    for now, then in zip(claims.check(recorded), published, strict=True):
        for name, value in asdict(now).items():
            expected = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert getattr(then, name) == expected, f"{now.id}, {name}: {REDRAW}"


def test_tables_are_those_of_the_records(recorded, published):
    numbers = tables.numbers(recorded, timings.load(PAPER).values())
    text = tables.markdown([tables.summary(published), *tables.of_claims(published), *numbers])
    assert (PAPER / "tables.md").read_text() == text, REDRAW


def test_the_readme_has_the_summary_of_the_claims(published):
    _, table = tables.markdown([tables.summary(published)]).split("\n\n")
    assert table in (ROOT / "README.md").read_text(), "put this into README.md:\n" + table


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


def test_counts_in_the_readme_are_true():
    """The quick profile's, which `make reproduce` runs, and what the paper's has more."""
    text = " ".join((ROOT / "README.md").read_text().split())
    quick, paper = (PROFILES[name].panels for name in ("quick", "paper"))
    words = {2: "two", 4: "four", 8: "eight", 14: "fourteen"}
    theirs = [panel for panel in quick if panel[0] != "B"]
    assert f"its {words[len(theirs)]} panels and {words[len(quick) - len(theirs)]} of ours" in text
    ours = [claim for claim in claims.about(claims.check({}), quick) if claim.ours]
    assert f"and of {words[len(ours)]} of ours" in text
    assert f"draws {words[len(paper) - len(quick)]} panels more" in text
