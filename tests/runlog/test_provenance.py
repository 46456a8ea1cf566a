"""The commit is told by a checkout and by an archive of one, and never somebody else's."""

import runpy
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from equilibrate.runlog import provenance

ROOT = Path(__file__).parents[2]


def git(folder, *words):
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def told_by(file):
    return runpy.run_path(str(file))["commit"]()


@pytest.fixture
def copy(tmp_path):
    """The module, and the attributes it needs, in a repository that does not know them yet."""
    file = tmp_path / "src" / "equilibrate" / "runlog" / "provenance.py"
    file.parent.mkdir(parents=True)
    shutil.copy(provenance.__file__, file)
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "Begin")
    return file


def test_a_checkout_tells_its_commit_and_whether_the_code_was_changed_since(copy, tmp_path):
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Add")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert told_by(copy) == head
    (tmp_path / "results.jsonl").write_text("what a run writes is no change of the code")
    assert told_by(copy) == head
    copy.with_name("another.py").touch()
    assert told_by(copy) == head + "+"


def test_an_archive_tells_the_commit_it_was_made_from(copy, tmp_path, tmp_path_factory):
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Add")
    elsewhere = tmp_path_factory.mktemp("archive")
    git(tmp_path, "archive", "--output", str(elsewhere / "it.tar"), "HEAD")
    with tarfile.open(elsewhere / "it.tar") as archive:
        archive.extractall(elsewhere, filter="data")
    told = told_by(elsewhere / copy.relative_to(tmp_path))
    assert told == git(tmp_path, "rev-parse", "HEAD")


def test_it_is_unknown_to_a_copy_in_a_repository_that_does_not_track_it(copy):
    assert told_by(copy) is None


def test_it_is_unknown_without_git(copy, tmp_path, monkeypatch):
    git(tmp_path, "add", ".")
    monkeypatch.setenv("PATH", "")
    assert told_by(copy) is None
