"""The examples with trainers, and torchrun, as a reader runs them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = {"lightning_trainer.py": ["--epochs", "4"], "hugging_face.py": ["--steps", "60"]}


def run(command, folder):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_hugging_face_cools_down_and_resumes(tmp_path):
    for more in ([], ["--resume"]):
        printed = run([EXAMPLES / "hugging_face.py", "--steps", "200", *more], tmp_path)
        rates = re.findall(r"'learning_rate': '(.*?)'", printed)
        assert float(rates[-1]) == pytest.approx(0.003 / 40)  # of the last step of the decay
        assert "equilibrate: at step 160 the learning rate begins to fall from 0.003" in printed
        assert "'equilibrate/" not in printed
        assert "'loss'" in printed
        shutil.rmtree(tmp_path / "hugging_face_example" / "checkpoint-200")


@pytest.mark.parametrize("name", QUICK)
def test_at_most_five_lines_turn_it_on_and_it_runs_without_them(name, tmp_path):
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines(keepends=True)
    plain = [line for line in lines if not line.rstrip().endswith("# equilibrate")]
    assert 0 < len(lines) - len(plain) <= 5
    assert not re.search(r"^(from|import) equilibrate", "".join(plain), re.MULTILINE)
    (tmp_path / "plain.py").write_text("".join(plain), encoding="utf-8")
    assert "equilibrate/" not in run(["plain.py", *QUICK[name]], tmp_path)


def test_lightning_cools_down_and_resumes(tmp_path):
    command = [EXAMPLES / "lightning_trainer.py", "--epochs", "4"]
    assert "the learning rate decays linearly until step 512" in run(command, tmp_path)
    [last] = (tmp_path / "lightning_example").glob("epoch=2-*.ckpt")
    assert "'equilibrate/lr': '0'" in run([*command, "--resume", last], tmp_path)


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_torchrun(name, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = run([*torchrun, EXAMPLES / name, "--epochs", "2"], tmp_path)
    assert printed.count("epoch  2") == 1  # process 0 alone prints
