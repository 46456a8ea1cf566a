"""Several processes share the runs of a reproduction, and give the results of a single process."""

import os
import shutil
import socket
import subprocess
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from support import forks

from equilibrate.runlog import records
from equilibrate.runlog.lock import lock
from equilibrate_paper.analysis import results
from equilibrate_paper.runs import timings
from equilibrate_paper.runs.ranks import Ranks, connect
from equilibrate_paper.runs.reproduce import reproduce

pytestmark = pytest.mark.slow

PANELS = ["2a", "B1a"]
SHORT = {"epochs_scale": 0.02, "seeds": 4}
PARTS = {"mlp-initial", "mlp-grid", "mlp-sequence.100-101", "mlp-sequence.102-103"}
TIMEOUT = 60


def arguments(out: Path, epochs_scale: float) -> list[str]:
    command = ["reproduce", *PANELS, "--seeds", "4", "--device", "cpu", "--out", str(out)]
    return [*command, "--epochs-scale", str(epochs_scale)]


def start(folder: Path, out: Path, epochs_scale: float, *options: str) -> list[ForkServerProcess]:
    """Start two processes that reproduce the panels together, with their output in `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        forks.start(
            forks.command_line,
            [*arguments(out, epochs_scale), *options],
            folder / f"rank{rank}.txt",
            {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


def finish(processes: list[ForkServerProcess], folder: Path) -> tuple[list[int | None], str]:
    """Wait for processes; return their exit codes, None for one that hangs, and their output."""
    for process in processes:
        process.join(TIMEOUT)
    codes = [process.exitcode for process in processes]
    kill(processes)
    return codes, "".join((folder / f"rank{rank}.txt").read_text() for rank in range(2))


def kill(processes: list[ForkServerProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    out = tmp_path_factory.mktemp("single")
    reproduce(PANELS, out=out, **SHORT)
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The command as a user runs it."""
    out = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "equilibrate_paper", *arguments(out, 0.02)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            output = process.communicate(timeout=TIMEOUT)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends the processes that it has started
            raise
    assert process.returncode == 0, output
    return out, output


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "copy")


def names(out: Path) -> set[str]:
    return {path.stem for path in (out / "records").iterdir()}


def tables_without_timings(out: Path) -> list[str]:
    lines = (out / "tables.md").read_text().splitlines()
    return [line for line in lines if "CPU, torch" not in line and " s |  |" not in line]


def assert_same_results(out: Path, expected: Path) -> None:
    found, whole = (results.load(folder / "records") for folder in (out, expected))
    assert list(found) == list(whole)
    for name, result in whole.items():
        assert found[name].run == result.run
        assert found[name].rows == result.rows
    assert (out / "claims.json").read_bytes() == (expected / "claims.json").read_bytes()
    assert tables_without_timings(out) == tables_without_timings(expected)


def test_two_processes_give_the_results_of_one(made, single):
    out, output = made
    assert names(out) == PARTS
    assert_same_results(out, single)
    assert set(timings.load(out)) == PARTS
    assert (out / "figures" / "fig2a.svg").exists()
    assert output.count("report.html ") == 1  # only one process reports
    assert output.count("all runs") == 1


def test_processes_stop_together_and_continue(tmp_path, single):
    """The time is over during the first stage, so no run of the next one begins."""
    out = tmp_path / "out"
    codes, output = finish(start(tmp_path, out, 0.02, "--max-minutes", "1e-9"), tmp_path)
    assert codes == [3, 3], output
    assert output.count("Stopped at the time limit") == 1
    assert not any("sequence" in name for name in names(out))
    codes, output = finish(start(tmp_path, out, 0.02), tmp_path)
    assert codes == [0, 0], output
    assert_same_results(out, single)


def test_another_number_of_processes_completes_the_parts(copy, single):
    """A finished part is kept, an unfinished one is continued, and missing seeds are run."""
    kept = copy / "records" / "mlp-sequence.100-101.jsonl"
    unfinished = copy / "records" / "mlp-sequence.102-103.jsonl"
    before = kept.read_bytes()
    lines = unfinished.read_bytes().splitlines(keepends=True)
    unfinished.write_bytes(b"".join(lines[:5]))
    (copy / "checkpoints" / "mlp-sequence.102-103.pt").unlink()
    (copy / "checkpoints" / "mlp-sequence.102-103.pt.previous").unlink(missing_ok=True)
    reproduce(PANELS, out=copy, **SHORT)
    assert names(copy) == PARTS
    assert kept.read_bytes() == before
    assert_same_results(copy, single)
    unfinished.unlink()
    reproduce(PANELS, out=copy, **SHORT)
    assert names(copy) == PARTS
    assert_same_results(copy, single)


def test_killed_processes_continue_with_the_same_command(tmp_path):
    out = tmp_path / "killed"
    processes = start(tmp_path, out, 0.1)
    parts = [out / "records" / f"{name}.jsonl" for name in PARTS if "." in name]
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline and all(process.is_alive() for process in processes):
        if all(part.exists() and part.read_bytes().count(b"\n") > 2 for part in parts):
            break
        time.sleep(0.01)
    kill(processes)
    assert all(records.read(part).rows[-1]["epoch"] < 55 for part in parts)
    codes, output = finish(start(tmp_path, out, 0.1), tmp_path)
    assert codes == [0, 0], output
    assert names(out) == PARTS
    settings = SHORT | {"epochs_scale": 0.1}
    reproduce(PANELS, out=tmp_path / "single", **settings)
    assert_same_results(out, tmp_path / "single")


def test_failure_of_one_process_ends_all(copy, tmp_path):
    (copy / "records" / "mlp-sequence.102-103.jsonl").unlink()
    (copy / "records" / "mlp-sequence.100-101.jsonl").unlink()
    checkpoint = copy / "checkpoints" / "mlp-sequence.102-103.pt"
    checkpoint.unlink()
    checkpoint.mkdir()  # rank 1 cannot remove it
    codes, output = finish(start(tmp_path, copy, 0.02), tmp_path)
    assert all(codes), output
    assert "equilibrate-paper: rank 1 failed: " in output
    assert "mlp-sequence.102-103.pt" in output
    assert records.read(copy / "records" / "mlp-sequence.100-101.jsonl").rows[-1]["epoch"] == 11


def test_locked_folder_ends_all_processes(copy, tmp_path):
    with lock(copy):
        codes, output = finish(start(tmp_path, copy, 0.02), tmp_path)
    assert all(codes), output
    assert output.count("equilibrate-paper: another run is writing to") == 1


def test_single_process_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with connect() as ranks:
        assert ranks == Ranks(rank=0, size=1, local_rank=0)
    assert ranks.together(lambda: 3) == [3]
    assert ranks.first(lambda: 3) == 3
    with pytest.raises(ValueError, match="my own error"):
        ranks.together(lambda: (_ for _ in ()).throw(ValueError("my own error")))
