"""The script that counts lines of code and calls."""

SOURCE = '''"""A module."""

x = 1  # one
# none


def f():
    """Text
    of two lines."""
    y = (
        2
    )
    return y
'''


def test_comments_docstrings_and_blank_lines_are_not_code(load):
    assert load("size").lines_of(SOURCE) == 6


def test_a_decision_runs_through_few_files(load):
    size = load("size")
    calls = size.deciding(lambda optimizer: size.eq.Cooldown(optimizer, size.STEPS))
    assert 0 < len(calls.files) <= 13
    assert 0 < len(calls.classes) <= 13
