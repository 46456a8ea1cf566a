"""Every Python example of the README and the documentation runs as printed, top to bottom."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    p for p in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))] if "```python" in p.read_text()
]


@pytest.mark.filterwarnings("ignore:the state was saved with total_steps")  # said on the page
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.8 passes it in SequentialLR
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    namespace: dict[str, object] = {"__name__": "example"}
    for block in blocks:
        exec(compile(block, page.name, "exec"), namespace)


def test_the_readme_names_the_two_commands():
    assert "```sh\nmake reproduce\nmake test\n```" in (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert "\nreproduce:" in makefile
    assert "\ntest:" in makefile


def test_the_compatibility_page_names_the_versions_that_are_tested():
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    table = page.split("## Versions")[1].split("##")[0]
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+)", table, re.MULTILINE)
    pins = set((ROOT / "constraints.txt").read_text().splitlines())
    assert len(rows) == 8
    for package, version in rows:
        assert f"{package}=={version}" in pins
