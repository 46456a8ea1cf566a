"""Count what the project consists of, and what a step of it runs through.

    python benchmarks/size.py

Lines of code are those with a token that is not a comment or a docstring. A file or a class counts
as touched if one of its functions runs. `import equilibrate` is timed in fresh processes.
"""

import ast
import inspect
import io
import os
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import equilibrate as eq

ROOT = Path(__file__).parents[1]
LIBRARY = Path(inspect.getfile(eq)).parent
LAYOUT = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
STEPS = 2000


def lines_of(source: str) -> int:
    """Return the number of lines of code, without comments, docstrings and blank lines."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for part in node.body if isinstance(node, DOCUMENTED) else ():
            value = part.value if isinstance(part, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                documentation.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*LAYOUT, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)


def count(*folders: Path) -> tuple[int, int]:
    """Return lines of code and files of some folders."""
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return sum(lines_of(file.read_text(encoding="utf-8")) for file in files), len(files)


def public_names() -> list[str]:
    """Return the functions and classes at the top of the library's public modules."""
    found = []
    for file in sorted(LIBRARY.rglob("*.py")):
        parts = file.relative_to(LIBRARY).with_suffix("").parts
        if any(part.startswith("_") for part in parts if part != "__init__"):
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and not node.name.startswith("_"):
                found.append(f"{'.'.join(parts)}.{node.name}")
    return found


class Calls:
    """Calls of the library's functions inside a block: how many, in which files and classes."""

    def __init__(self) -> None:
        self.number = 0
        self.files: set[str] = set()
        self.classes: set[str] = set()

    def __enter__(self) -> "Calls":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(LIBRARY)):
            return
        self.number += 1
        self.files.add(code.co_filename)
        owner, _, _ = code.co_qualname.partition(".<locals>")
        name, _, _ = owner.rpartition(".")
        if name and not name.startswith("<"):
            self.classes.add(f"{code.co_filename}:{name}")


def training(
    make: Callable[[Any], Any], steps: int = STEPS
) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Yield a scheduler and its next step after each backward pass of a small training."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    labels = (inputs[:, 0] + torch.randn(512) > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    scheduler = make(optimizer)
    for _ in range(steps):
        batch = torch.randint(512, (16,))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        losses = [loss.detach()] if isinstance(scheduler, eq.Cooldown) else []

        def both(losses: list[Any] = losses) -> None:
            optimizer.step()
            scheduler.step(*losses)

        yield scheduler, both


def deciding(make: Callable[[Any], Any]) -> Calls:
    """Return the calls of the scheduler's step at its last decision."""
    found = Calls()
    for scheduler, both in training(make):
        made, calls = len(scheduler.decisions), Calls()
        step = scheduler.step

        def watched(*arguments: Any, step: Any = step, calls: Calls = calls) -> None:
            with calls:
                step(*arguments)

        scheduler.step = watched
        both()
        scheduler.step = step
        if len(scheduler.decisions) > made:
            found = calls
    return found


def unmeasured() -> tuple[float, float]:
    """Return the median calls of an `optimizer.step()` with `Cooldown.step(loss)`.

    Before the decay, and in it. Less than half of the steps are measured before the decay if there
    are many of them: the median is that of the others.
    """
    numbers: dict[bool, list[int]] = {False: [], True: []}
    steps = 4 * STEPS
    for scheduler, both in training(lambda optimizer: eq.Cooldown(optimizer, steps), steps):
        decaying = scheduler.is_decaying
        with Calls() as calls:
            both()
        numbers[decaying].append(calls.number)
    return statistics.median(numbers[False]), statistics.median(numbers[True])


def import_milliseconds(repeats: int = 7) -> tuple[float, float]:
    """Return the shortest time of `import equilibrate` after `import torch`, and of torch's own."""
    program = (
        "import time; t = time.perf_counter(); import torch; u = time.perf_counter(); "
        "import equilibrate; print(time.perf_counter() - u, u - t)"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(LIBRARY.parent), *sys.path])}
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        for _ in range(repeats)
    ]
    times = [tuple(1e3 * float(part) for part in run.stdout.split()) for run in runs]
    return min(own for own, _ in times), min(torchs for _, torchs in times)


def main() -> None:
    """Print a row for each number."""
    paper = ROOT / "paper"
    library, files = count(LIBRARY)
    both, both_files = count(LIBRARY, paper / "src")
    tests, test_files = count(ROOT / "tests", paper / "tests")
    print(f"library: {library:,} lines of code in {files} files")
    print(f"library and paper: {both:,} lines in {both_files} files")
    print(f"tests: {tests:,} lines in {test_files} files")
    print(f"public functions and classes of the library: {len(public_names())}")
    for name, make in {
        "Cooldown.step(loss)": lambda optimizer: eq.Cooldown(optimizer, STEPS),
        "FDRScheduler.step()": eq.FDRScheduler,
    }.items():
        calls = deciding(make)
        print(f"{name} that decides: {len(calls.files)} files, {len(calls.classes)} classes")
    constant, decay = unmeasured()
    print("library calls in an unmeasured optimizer.step() with its step(loss), median: ", end="")
    print(f"{constant:g} at the constant rate, {decay:g} in the decay")
    before = os.getloadavg()[0]
    own, torchs = import_milliseconds()
    print(f"import equilibrate: {own:.0f} ms after torch's {torchs:.0f}, best of 7; ", end="")
    print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
