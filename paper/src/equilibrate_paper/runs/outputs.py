"""Write figures, claims, tables and the report of the runs that are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from equilibrate.record import jsonl
from equilibrate_paper.analysis import judged, results, verdicts
from equilibrate_paper.analysis.judged import JudgedClaim
from equilibrate_paper.output import figures, page, tables
from equilibrate_paper.output.markdown import to_markdown
from equilibrate_paper.protocol.panels import PANELS
from equilibrate_paper.runs.errors import RunError
from equilibrate_paper.runs.folder import figure_path


def write_outputs(out: Path, panels: Sequence[str] = ()) -> list[JudgedClaim]:
    """Draw figures and check claims from out/records, without running anything.

    Args:
        out: The folder of the reproduction.
        panels: The panels to draw, by default all whose runs are recorded.

    Returns:
        All claims with their verdicts.

    Raises:
        RunError: If a run that a panel needs is not recorded.
    """
    recorded = results.load(out / "records")
    drawable = [
        panel
        for panel in PANELS
        if all(name in recorded and len(recorded[name].epoch) for name in PANELS[panel].runs)
    ]
    missing = [panel for panel in panels if panel not in drawable]
    if missing or not drawable:
        what = f"figure {missing[0]}" if missing else "any figure"
        raise RunError(f"{out / 'records'} lacks runs for {what}: run them first")
    for panel in panels or drawable:
        figures.save(panel, recorded, out / "figures")
    found = verdicts.judge(recorded)
    judged.save(found, out / "claims.json")
    numbers = tables.numbers(recorded)
    claim_tables = [tables.claim_table(group) for group in verdicts.grouped(found)]
    text = to_markdown([tables.summary(found), *claim_tables, *numbers])
    jsonl.write_file(out / "tables.md", text)
    drawn = [panel for panel in drawn_panels(out) if panel in drawable]
    text = page.compose(out, found, drawn, recorded, numbers)
    jsonl.write_file(out / "report.html", text)
    return found


def drawn_panels(out: Path) -> list[str]:
    """Return the panels whose figures exist.

    Args:
        out: The folder of the reproduction.
    """
    return [panel for panel in PANELS if figure_path(out, panel).exists()]
