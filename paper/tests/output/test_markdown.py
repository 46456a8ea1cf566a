"""Tables and their Markdown."""

import pytest

from equilibrate_paper.output.markdown import Table, to_markdown


def test_markdown_has_a_heading_and_a_line_for_each_row():
    one = Table("One", ("a", "b"), [("1", "2"), ("3", "4")])
    two = Table("Two", ("c",), [])
    assert to_markdown([one, two]) == (
        "### One\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |\n\n### Two\n\n| c |\n| --- |\n"
    )


def test_vertical_bars_are_escaped():
    assert "| \\|x\\| < 1 |" in to_markdown([Table("T", ("a",), [("|x| < 1",)])])


def test_a_row_with_the_wrong_number_of_cells_raises():
    with pytest.raises(ValueError, match=r"each row of the table 'T' must have 2 cells, .* got 1"):
        Table("T", ("a", "b"), [("1",)])
