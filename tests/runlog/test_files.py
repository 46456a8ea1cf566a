"""Files are written completely or not at all."""

import pytest

from equilibrate.runlog.files import WriteError, replacing, write


def test_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "new" / "text.txt"
    assert write(path, "θ") == path
    with replacing(path) as file:
        file.write(b"second")
        assert path.read_text() == "θ"
    assert path.read_text() == "second"
    assert list(path.parent.iterdir()) == [path]


def test_error_in_the_block_leaves_the_file_as_it_was(tmp_path):
    def fail():
        with replacing(path) as file:
            file.write(b"second")
            raise RuntimeError("mine")

    path = write(tmp_path / "text.txt", b"first")
    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_leaves_the_file_as_it_was(tmp_path, full_disk):
    path = write(tmp_path / "text.txt", "first")
    with full_disk(1000), pytest.raises(WriteError, match=r"text.txt \(File too .*: free some spa"):
        write(path, 2000 * "x")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_folder_that_cannot_be_created_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="or choose a folder you can write to"):
        write(tmp_path / "file" / "below.txt", "text")
