"""Imports follow the data flow: a part of the package imports only from parts listed before it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import equilibrate

SOURCE = Path(equilibrate.__file__).parent
PARTS = [
    *("_arguments", "estimates", "telescoped", "observables", "averages", "relations", "readings"),
    *("scale_invariance", "solvable", "mean_loss", "landscape"),
    *("watching", "monitor", "forecast", "schedulers", "stationarity"),
    *("record", "report", "integrations", "cli", "__main__"),
]
LAZY = {"landscape", "solvable", "stationarity", "record", "report", "integrations", "cli"}
NEEDS = {"watching": {"triton"}, "report": {"jinja2"}}
"""What comes with torch, where it is used besides torch and numpy."""


def imports(part: str) -> set[tuple[str, ...]]:
    """Every dotted name that a part imports, `from a import b` as a.b."""
    files = (SOURCE / part).rglob("*.py") if (SOURCE / part).is_dir() else [SOURCE / f"{part}.py"]
    names = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {tuple(alias.name.split(".")) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module, f"a relative import in {path}"
                stem = tuple(node.module.split("."))
                names |= {(*stem, alias.name) for alias in node.names}
    return names


def test_every_part_has_its_place_in_the_order():
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__pycache__"} == set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_from_earlier_ones(part):
    used = {name[1] for name in imports(part) if name[0] == "equilibrate" and len(name) > 1}
    assert not used & set(PARTS[PARTS.index(part) + 1 :])


@pytest.mark.parametrize("part", [part for part in PARTS if part != "integrations"])
def test_torch_and_numpy_are_enough(part):
    outside = {name[0] for name in imports(part)} - {"torch", "numpy", "equilibrate"}
    assert outside - set(sys.stdlib_module_names) <= NEEDS.get(part, set())


def test_integrations_do_not_need_the_paper():
    assert "equilibrate_paper" not in {name[0] for name in imports("integrations")}


def test_every_public_name_can_be_had():
    assert all(hasattr(equilibrate, name) for name in equilibrate.__all__)
    assert set(equilibrate.__all__) <= set(dir(equilibrate))


def test_importing_the_package_loads_no_part_that_was_not_asked_for():
    command = [sys.executable, "-c", "import sys, equilibrate; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "equilibrate.monitor" in loaded
    assert not {f"equilibrate.{part}" for part in LAZY} & set(loaded)
