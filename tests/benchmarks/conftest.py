"""Benchmarks are scripts, not a package: a fixture imports them."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a benchmark script, which finds its neighbours on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        if file.is_relative_to(BENCHMARKS):
            del sys.modules[name]
