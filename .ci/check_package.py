"""Check the wheels and the sdist in dist/, and install the library without any extra.

The new virtual environment gets equilibrate from the wheel. Torch, numpy and what these two need
are links to the packages of the interpreter that runs this script, since torch is too large to be
installed once more. Nothing else is there: the dependencies of the extras are absent.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLE = """
import sys
import torch
import equilibrate as eq

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
scheduler = eq.Cooldown(optimizer, total_steps=2000)  # line 1
recorder = eq.Recorder(sys.argv[1], scheduler)
for step in range(2000):
    optimizer.zero_grad()
    loss = (model(torch.randn(8, 3)) - torch.randn(8, 1)).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step(loss)  # line 2
    if step % 100 == 99:
        recorder.record(loss=loss)
recorder.close()
assert scheduler.get_last_lr() == [0.0], scheduler.last_decision
print(eq.__version__, eq.__file__)
"""
ABSENT = ("typer", "rich", "matplotlib", "scipy", "sklearn", "pooch", "equilibrate_paper")


def main() -> None:
    """Check everything; an AssertionError says what is wrong."""
    dist = ROOT / "dist"
    [wheel] = dist.glob("equilibrate-*.whl")
    [paper] = dist.glob("equilibrate_paper-*.whl")
    [sdist] = dist.glob("*.tar.gz")
    check_wheel(wheel, ROOT)
    check_wheel(paper, ROOT / "paper")
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
            "--wheel-dir", folder, str(sdist))  # fmt: skip
        [again] = Path(folder).glob("*.whl")
        assert contents(again) == contents(wheel), "the sdist makes another wheel"
        check_clean_install(wheel, Path(folder) / "venv")
    print(f"{wheel.name}, {sdist.name} and {paper.name} are fine")


def check_wheel(wheel: Path, root: Path) -> None:
    """Check that a wheel has the files of its project in `src`, no others, and its metadata."""
    files = contents(wheel)
    expected = {
        str(path.relative_to(root / "src"))
        for path in (root / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in files if ".dist-info/" not in name}
    assert packed == expected, f"other files than in src: {sorted(packed ^ expected)}"
    [name] = [name for name in files if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(name).decode()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for license in project.get("license-files", []):
        assert name.replace("METADATA", f"licenses/{license}") in files
    for line in (
        "License-Expression: MIT",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {requirement}" for requirement in project["dependencies"]),
    ):
        assert line in text.splitlines(), f"the metadata has no line {line!r}"


def check_clean_install(wheel: Path, folder: Path) -> None:
    """Install a wheel without extras; try the example, and the commands on what it recorded."""
    venv.create(folder)
    python = folder / "bin" / "python"
    [site] = folder.glob("lib/python*/site-packages")
    link_core(site)
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-index", str(wheel))  # there is nothing else to install
    for name in ABSENT:
        absent = subprocess.run([python, "-Ic", f"import {name}"], capture_output=True)
        assert absent.returncode != 0, f"{name} is installed with the library"
    record = folder / "run"
    found = run(python, "-W", "error", "-Ic", EXAMPLE, record)
    assert str(site) in found, f"the example did not use the wheel: {found}"
    for command in ([folder / "bin" / "equilibrate"], [python, "-Im", "equilibrate"]):
        assert str(record / "report.html") in run(*command, "report", record)
        assert "step 2,000" in run(*command, "watch", "--once", record)


def link_core(site: Path) -> None:
    """Link torch, numpy and what they need into the site-packages of another environment."""
    wanted, seen = ["torch", "numpy"], set()
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # needed on another platform only
            continue
        for file in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            target = Path(str(distribution.locate_file(file)))
            if target.exists() and not (site / file).exists():
                os.symlink(target, site / file)
        needs = [r for r in distribution.requires or [] if "extra ==" not in r]
        wanted += [re.split(r"[\s;<>=!~\[(]", requirement)[0] for requirement in needs]


def contents(wheel: Path) -> dict[str, int]:
    """Return the checksum of each file in a wheel but its list of files."""
    with zipfile.ZipFile(wheel) as archive:
        return {i.filename: i.CRC for i in archive.infolist() if not i.filename.endswith("RECORD")}


def run(*command: str | Path) -> str:
    """Return the output of a command, run without this environment's PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main()
