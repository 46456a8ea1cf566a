"""States of earlier releases are loaded, and their runs continue as they did then."""

import functools
import gzip
import io
import math
from pathlib import Path

import pytest
import torch
from support import states

import equilibrate

FILES = sorted((Path(__file__).parent / "states").glob("*.pt.gz"))


@functools.cache
def content(path):
    return torch.load(io.BytesIO(gzip.decompress(path.read_bytes())))


def test_this_release_has_its_states():
    """If this fails, run `python tests/states/make.py`."""
    assert f"{equilibrate.__version__}.pt.gz" in [path.name for path in FILES]
    assert content(FILES[-1]).keys() == states.CASES.keys()


CASES = [
    pytest.param(path, name, id=f"{path.name.removesuffix('.pt.gz')}, {name}")
    for path in FILES
    for name in content(path)
]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_run_of_an_earlier_release_continues(path, name):
    """With other versions of torch sums may be rounded differently."""
    saved = content(path)[name]
    case = states.CASES[name]()
    case.load_state_dict(saved["state"])
    found = states.finish(case)
    for key, expected in saved["found"].items():
        assert len(found[key]) == len(expected)
        for got, number in zip(found[key], expected, strict=True):
            assert got == pytest.approx(number, rel=1e-5, abs=1e-8) or (
                math.isnan(got) and math.isnan(number)
            ), key
