"""Imports go one way through the house: a module imports only from what stands before it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "equilibrate"

ORDER = [
    "solvable",
    "observables",
    "averages",
    "estimates",
    "relations",
    "dots",
    "probes",
    "monitor",
    "scheduler",
    "layers",
    "kernels",
    "ensemble",
    "landscape",
    "provenance",
    "records",
    "checkpoints",
    "plots",
    "report",
    "experiments",
    "cli",
    "__main__",
]
INSIDE = {
    "kernels": ["streams", "_geometry", "_products", "_repack", "_launch", "__init__"],
    "ensemble": [
        "values",
        "sampling",
        "precision",
        "parameters",
        "graphs",
        "checks",
        "updates",
        "_kernels",
        "fused",
        "batches",
        "chunks",
        "stages",
        "network",
        "ensemble",
        "__init__",
    ],
    "experiments": [
        "__init__",
        "formats",
        "data",
        "devices",
        "models",
        "training",
        "landscape_figure",
        "landscape_command",
        "protocols",
        "panels",
        "profiles",
        "timings",
        "runs",
        "forecast",
        "results",
        "statistics",
        "measures",
        "style",
        "beyond",
        "figures",
        "findings",
        "statements",
        "claims",
        "tables",
        "page",
        "terminal",
        "reproduce",
    ],
}
CORE_NEEDS = {"torch", "numpy", "equilibrate", "triton"}
CORE = ORDER[: ORDER.index("plots")]


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def modules(path: Path):
    """The parts of the full name of all that a file imports."""
    package = ["equilibrate", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        for name in names:
            yield name.split(".")


def imported(path: Path):
    """(top-level package, room of ours or None) of every import of a file."""
    for parts in modules(path):
        yield parts[0], parts[1] if parts[0] == "equilibrate" and len(parts) > 1 else None


FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


def test_every_room_has_its_place():
    assert {room(path) for path in FILES} <= set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_module_imports_only_from_what_stands_before_it(path):
    here = ORDER.index(room(path))
    for _, other in imported(path):
        if other in ORDER:
            assert ORDER.index(other) <= here, f"{path.name} imports {other}"


@pytest.mark.parametrize("inside", INSIDE)
def test_within_a_room_imports_go_one_way_too(inside):
    order, folder = INSIDE[inside], SOURCE / inside
    assert {path.stem for path in folder.glob("*.py")} == set(order)
    for path in folder.glob("*.py"):
        for parts in modules(path):
            if parts[:2] == ["equilibrate", inside] and parts[2] in order:
                here, there = order.index(path.stem), order.index(parts[2])
                assert there <= here, f"{path.name} imports {parts[2]}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_core_needs_torch_and_numpy_alone(path):
    if room(path) in CORE:
        import sys

        outside = {top for top, _ in imported(path)} - CORE_NEEDS - set(sys.stdlib_module_names)
        assert not outside


def test_the_public_names_are_there_and_a_monitor_knows_no_scheduler():
    import equilibrate as eq

    assert all(hasattr(eq, name) for name in eq.__all__)
    assert "scheduler" not in {other for _, other in imported(SOURCE / "monitor.py")}
