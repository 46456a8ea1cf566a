"""Imports follow the data flow, torch and numpy are enough, and names are unique."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import equilibrate

SOURCE = Path(equilibrate.__file__).parent
ORDER = [
    "_arguments",
    "estimates",
    "telescoped",
    "readings",
    "scale_invariance",
    "observables",
    "averages",
    "relations",
    "solvable",
    "watching",
    "monitor",
    "forecast",
    "stationarity",
    "schedulers",
    "landscape",
    "record",
    "report",
    "integrations",
    "cli",
    "__main__",
]
"""Parts of the library: each imports only from those before it."""
NEEDS = {"watching": {"triton"}, "report": {"jinja2"}}
"""What comes with torch and is used by one part."""


def files(part):
    return (
        [SOURCE / f"{part}.py"]
        if (SOURCE / f"{part}.py").exists()
        else [*(SOURCE / part).rglob("*.py")]
    )


def imported(part):
    """Every dotted name that a part imports, `from a import b` as a.b."""
    for path in files(part):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from ([*node.module.split("."), alias.name] for alias in node.names)


def test_every_part_imports_only_from_earlier_ones():
    for place, part in enumerate(ORDER):
        used = {name[1] for name in imported(part) if name[0] == "equilibrate" and len(name) > 1}
        assert not used & set(ORDER[place + 1 :]), part


def test_nothing_imports_what_only_one_rule_needs():
    users = [p for p in ORDER if ["equilibrate", "stationarity"] in [n[:2] for n in imported(p)]]
    assert users == ["stationarity"]


def test_every_part_has_its_place_in_the_order():
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__pycache__"} == set(ORDER)


def test_torch_and_numpy_are_enough():
    allowed = {"torch", "numpy", "equilibrate", *sys.stdlib_module_names}
    for part in ORDER:
        outside = {name[0] for name in imported(part)} - allowed
        assert "equilibrate_paper" not in outside, part
        assert part == "integrations" or outside <= NEEDS.get(part, set()), part


def test_a_class_name_occurs_once():
    names = Counter(
        node.name
        for part in ORDER
        if part != "integrations"  # each trainer has a callback of the same name
        for path in files(part)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_every_public_name_can_be_had():
    assert all(hasattr(equilibrate, name) for name in equilibrate.__all__)
    assert set(equilibrate.__all__) <= set(dir(equilibrate))


def test_importing_the_package_loads_no_part_that_was_not_asked_for():
    code = "import sys, equilibrate; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    parts = {name.split(".")[1] for name in loaded if name.startswith("equilibrate.")}
    assert "monitor" in parts
    lazy = {"landscape", "solvable", "stationarity", "record", "report", "integrations", "cli"}
    assert not lazy & parts
    assert "torch.distributed.tensor" not in loaded
