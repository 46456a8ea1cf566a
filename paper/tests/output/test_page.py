"""The page of a reproduction lists where its runs were made, even if the places differ."""

import re
from dataclasses import replace

import pytest
from paper_support.synthetic import write

from equilibrate_paper.analysis import results
from equilibrate_paper.output import page
from equilibrate_paper.protocol.profiles import profile


@pytest.fixture
def recorded(tmp_path):
    for name in ("mlp-initial", "mlp-schedules"):
        sides = {name: lambda time, lr, arm, seed: 1.0 for name in ("left", "right")}
        write(profile("paper").runs[name], tmp_path, sides)
    found = results.load(tmp_path / "records")
    here = {"torch": "2.13", "gpu": None, "started": "2026-11-15T10:00:00"}
    there = {"torch": "2.11", "gpu": None, "started": "2026-11-14T10:00:00", "commit": "abc"}
    environments = dict(zip(found, (here, there), strict=True))
    return {name: replace(result, environment=environments[name]) for name, result in found.items()}


def test_all_values_of_different_environments_are_listed(tmp_path, recorded):
    html = page.compose(tmp_path, [], [], recorded, [])
    table = html[html.index("Environment") :]
    texts = re.findall(r"<div>([^<]*)</div>", table)
    assert dict(zip(texts[::2], texts[1::2], strict=True)) == {
        "torch": "2.13, 2.11",
        "gpu": "–",
        "started": "2026-11-14T10:00:00 to 2026-11-15T10:00:00",
        "device": "cpu",
        "commit": "abc",
    }
