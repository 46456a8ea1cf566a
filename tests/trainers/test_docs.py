"""Every `py` block of the page on integrations runs as printed."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
BLOCKS = [
    block
    for block in re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    if "torchtitan" not in block
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: re.findall(r"(?:from|import) (\w+)", b)[0])
def test_a_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, PAGE.name, "exec"), {"__name__": "example"})


def test_there_are_blocks():
    assert len(BLOCKS) == 5
