"""Imports follow the data flow: a part of the package imports only from parts listed before it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import equilibrate

SOURCE = Path(equilibrate.__file__).parent

LAYERS = [
    "_arguments",
    "estimates",
    "telescoped",
    "gains",
    "stationarity",
    "readings",
    "outlook",
    "observables",
    "averages",
    "measurements",
    "relations",
    "scale_invariance",
    "solvable",
    "_engine",
    "monitor",
    "forecast",
    "rules",
    "layers",
    "decisions",
    "_watchers",
    "scheduler",
    "deterministic",
    "mean_loss",
    "landscape",
    "record",
    "runlog",
    "report",
    "integrations",
    "cli",
    "__main__",
]
CORE = {*LAYERS[: LAYERS.index("record")]}
CORE_NEEDS = {"torch", "numpy", "equilibrate", "triton"}  # Triton comes with torch on Linux
NEED_EXTRAS = {Path("landscape/plot.py")}
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def layer(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def dotted(path: Path) -> list[str]:
    parts = ["equilibrate", *path.relative_to(SOURCE).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path, *, top_level_only: bool = False):
    """Every dotted name that a file imports, `from a import b` as a.b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = dotted(path) if path.name == "__init__.py" else dotted(path)[:-1]
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = [*base, *(node.module.split(".") if node.module else [])]
            yield from ([*stem, alias.name] for alias in node.names)


def test_every_part_has_its_place_in_the_order():
    assert {layer(path) for path in FILES} <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_module_imports_only_from_earlier_layers(path):
    here = LAYERS.index(layer(path))
    used = {name[1] for name in imports(path) if name[0] == "equilibrate" and len(name) > 1}
    later = {other for other in used & set(LAYERS) if LAYERS.index(other) > here}
    assert not later


def test_modules_do_not_import_each_other_in_a_circle():
    known = {tuple(dotted(path)): path for path in FILES}
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for module, path in known.items():
        names = [tuple(name) for name in imports(path, top_level_only=True)]
        found = {n if n in known else n[:-1] for n in names}
        # A package's __init__ gathers its own modules; these may name their package's siblings.
        graph[module] = {other for other in found if other in known and other != module}
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], trail: tuple[tuple[str, ...], ...]) -> None:
        assert module not in trail, " -> ".join(".".join(m) for m in (*trail, module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_core_needs_torch_and_numpy_alone(path):
    if layer(path) in CORE and path.relative_to(SOURCE) not in NEED_EXTRAS:
        outside = {name[0] for name in imports(path)} - CORE_NEEDS - set(sys.stdlib_module_names)
        assert not outside


def test_a_monitor_knows_no_scheduler():
    assert ["equilibrate", "scheduler"] not in [n[:2] for n in imports(SOURCE / "monitor.py")]


def test_every_public_name_can_be_had():
    assert all(hasattr(equilibrate, name) for name in equilibrate.__all__)
    assert set(equilibrate.__all__) <= set(dir(equilibrate))


def test_importing_the_package_loads_no_part_that_was_not_asked_for():
    code = (
        "import sys, equilibrate; "
        "print(*sorted({m.split('.')[1] for m in sys.modules if m.startswith('equilibrate.')}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    lazy = {
        "landscape",
        "solvable",
        "record",
        "report",
        "integrations",
        "cli",
    }
    assert "monitor" in loaded
    assert not lazy & set(loaded)
