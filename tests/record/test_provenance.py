"""The commit is known in a checkout and in an archive of one, and only there."""

import runpy
import shutil
import subprocess
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import equilibrate
from equilibrate.record import provenance

ROOT = Path(__file__).parents[2]


def git(folder, *words):
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit_of(file):
    return runpy.run_path(str(file))["commit"]()


@pytest.fixture
def copy(tmp_path):
    """A copy of the module in a repository that does not track it yet."""
    file = tmp_path / "src" / "equilibrate" / "record" / "provenance.py"
    file.parent.mkdir(parents=True)
    shutil.copy(provenance.__file__, file)
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "Begin")
    return file


def test_checkout_knows_its_commit_and_uncommitted_changes(copy, tmp_path):
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Add")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(copy) == head
    (tmp_path / "results.jsonl").write_text("output of a run is not a change of the code")
    assert commit_of(copy) == head
    copy.with_name("another.py").touch()
    assert commit_of(copy) == head + "+"


def test_archive_knows_the_commit_it_was_made_from(copy, tmp_path, tmp_path_factory):
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Add")
    elsewhere = tmp_path_factory.mktemp("archive")
    git(tmp_path, "archive", "--output", str(elsewhere / "it.tar"), "HEAD")
    with tarfile.open(elsewhere / "it.tar") as archive:
        archive.extractall(elsewhere, filter="data")
    commit = commit_of(elsewhere / copy.relative_to(tmp_path))
    assert commit == git(tmp_path, "rev-parse", "HEAD")


def test_commit_is_unknown_to_an_untracked_copy(copy):
    assert commit_of(copy) is None


def test_commit_is_unknown_without_git(copy, tmp_path, monkeypatch):
    git(tmp_path, "add", ".")
    monkeypatch.setenv("PATH", "")
    assert commit_of(copy) is None


def test_environment_names_versions_and_time():
    found = provenance.environment()
    assert found["torch"] == torch.__version__
    assert found["equilibrate"] == equilibrate.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["commit"] == provenance.commit()
    age = datetime.now(UTC) - datetime.fromisoformat(found["started"])
    assert 0 <= age.total_seconds() < 60
