"""Redraw the training study from its records: the tables of its page, and its figures.

    python benchmarks/training.py [--figures]

The study trained four models with nineteen ways to set the learning rate, with rules of an earlier
version of this library. The commit that made a run is in its record.
"""

import argparse
from pathlib import Path

from tables import markdown, replace_table
from training_study.results import Results
from training_study.tables import tables

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "training"
PAGE = ROOT / "docs" / "training-study.md"


def with_tables(text: str, results: Results) -> str:
    """Return the text of the page with all tables as the records have them."""
    for name, table in tables(results).items():
        text = replace_table(text, name, markdown(*table))
    return text


def main() -> None:
    """Write the tables, and draw the figures if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", action="store_true", help="draw the figures too")
    options = parser.parse_args()
    results = Results(OUT)
    PAGE.write_text(with_tables(PAGE.read_text(), results))
    if options.figures:
        from training_study import figures  # matplotlib is not needed for the tables

        figures.draw(results, PAGE.parent / "figures")


if __name__ == "__main__":
    main()
