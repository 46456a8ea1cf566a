"""Data sets are the official files, preprocessed as in appendix B, wherever they are found."""

import gzip
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest
import torch
from paper_support.official_files import sha256, write_cifar10, write_mnist
from sklearn.datasets import load_digits

from equilibrate_paper.data import files
from equilibrate_paper.data.datasets import DataError, load

WRITE = {"mnist": write_mnist, "cifar10": write_cifar10}


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    """The three folders that are searched, of which only that of the argument exists."""
    folders = {name: tmp_path / name for name in ("argument", "environment", "cache")}
    folders["argument"].mkdir()
    monkeypatch.setenv("EQUILIBRATE_DATA", str(folders["environment"]))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(pooch, "os_cache", lambda project: folders["cache"])
    return folders


def test_digits_are_standardized_over_the_training_set():
    digits, raw = load("digits"), load_digits()
    train = raw.images[:1500]
    images = torch.cat([digits.train_images, digits.test_images])
    np.testing.assert_allclose(images[:, 0], (raw.images - train.mean()) / train.std(), atol=1e-6)
    assert torch.cat([digits.train_labels, digits.test_labels]).tolist() == raw.target.tolist()
    assert len(digits.train_images) == len(digits.train_labels) == 1500
    assert digits.fingerprint.startswith("a1dc5276eb19924f")  # it is in the records of quick runs


@pytest.mark.parametrize("compressed", [False, True])
def test_mnist_is_standardized_over_the_training_set(monkeypatch, tmp_path, compressed):
    pixels = write_mnist(monkeypatch, tmp_path, compressed)
    mnist = load("mnist", tmp_path)
    train = pixels.train_images.astype(np.float64)
    for images, raw in ((mnist.train_images, pixels[0]), (mnist.test_images, pixels[2])):
        np.testing.assert_allclose(images, (raw - train.mean()) / train.std(), atol=1e-6)


def test_cifar10_pixels_lie_between_minus_one_and_one(monkeypatch, tmp_path):
    pixels = write_cifar10(monkeypatch, tmp_path)
    cifar = load("cifar10", tmp_path)
    for images, raw in ((cifar.train_images, pixels[0]), (cifar.test_images, pixels[2])):
        np.testing.assert_allclose(images, (raw / 255 - 0.5) * 2, atol=1e-7)
        assert (images.min(), images.max()) == (-1, 1)


def test_unknown_name_raises():
    with pytest.raises(ValueError, match="name='svhn' is not a data set; choose one of digits, "):
        load("svhn")


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("change", ["missing", "last bit", "truncated", "empty", "a folder"])
def test_file_that_is_not_the_official_one_raises(monkeypatch, tmp_path, name, change):
    WRITE[name](monkeypatch, tmp_path)
    source = files.SOURCES[name]
    path = tmp_path / source.folder / list(source.files)[1]
    content = path.read_bytes()
    path.unlink()
    if change == "a folder":
        path.mkdir()
    elif change != "missing":
        last = bytes([content[-1] ^ 1])
        path.write_bytes(
            {"last bit": content[:-1] + last, "truncated": content[:-1]}.get(change, b"")
        )
    reason = "is damaged or not the official file" if path.is_file() else "cannot read"
    with pytest.raises(DataError, match=f"{reason}.*remove the folder .* to download it again"):
        load(name, tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b[:10] + b"\7" + b[11:], lambda b: b"?"]
)
def test_damaged_gzip_file_raises(monkeypatch, tmp_path, damage):
    write_mnist(monkeypatch, tmp_path, compressed=True)
    path = tmp_path / "MNIST/raw/train-labels-idx1-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"cannot read .*train-labels-idx1-ubyte \("):
        load("mnist", tmp_path)


def test_folders_are_searched_in_order(monkeypatch, folders):
    for folder in folders.values():
        write_mnist(monkeypatch, folder)
        (folder / "MNIST/raw/t10k-labels-idx1-ubyte").unlink()  # the error names the folder
    for folder in folders.values():
        with pytest.raises(DataError, match=f"cannot read {folder}"):
            load("mnist", folders["argument"])
        (folder / "MNIST/raw").rename(folder / "elsewhere")


def test_error_lists_the_folders_that_were_searched(monkeypatch, folders):
    with pytest.raises(DataError, match="cifar10 was not found and downloading is dis") as caught:
        load("cifar10", folders["argument"], download=False)
    for folder in folders.values():
        assert f"\n  {folder}/cifar-10-batches-bin\n" in str(caught.value)
    assert "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz" in str(caught.value)
    monkeypatch.setenv("EQUILIBRATE_DATA", "")
    with pytest.raises(DataError) as caught:
        load("mnist", download=False)
    assert str(caught.value).count("MNIST/raw") == 1


class Server(ThreadingHTTPServer):
    """Serves `files` (path to content); of the paths in `truncated`, only the first half."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.truncated: set[str] = set()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        half = len(content) // 2
        self.wfile.write(content[:half] if self.path in self.server.truncated else content)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def serve(monkeypatch, server, name, folder, mirrors=("mirror",)):
    """Serve a data set from every mirror; return the fingerprint of the files on disk."""
    if name == "mnist":
        write_mnist(monkeypatch, folder, compressed=True)
        served = {f"MNIST/raw/{p.name}": p.read_bytes() for p in (folder / "MNIST/raw").iterdir()}
    else:
        write_cifar10(monkeypatch, folder)
        with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
            archive.add(folder / "cifar-10-batches-bin", "cifar-10-batches-bin")
        served = {"cifar-10-binary.tar.gz": (folder / "cifar-10-binary.tar.gz").read_bytes()}
    for mirror in mirrors:
        server.files |= {f"/{mirror}/{Path(file).name}": served[file] for file in served}
    source = replace(
        files.SOURCES[name],
        downloads={file: sha256(content) for file, content in served.items()},
        mirrors=tuple(f"{server.url}/{mirror}" for mirror in mirrors),
    )
    monkeypatch.setitem(files.SOURCES, name, source)
    return load(name, folder, download=False).fingerprint


def entries(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("place", ["argument", "environment", "cache"])
def test_download_goes_to_the_first_folder(monkeypatch, folders, server, tmp_path, name, place):
    if place == "cache":
        monkeypatch.delenv("EQUILIBRATE_DATA")
    argument = folders["argument"] if place == "argument" else None
    fingerprint = serve(monkeypatch, server, name, tmp_path / "remote")
    assert load(name, argument).fingerprint == fingerprint
    wanted = entries(tmp_path / "remote")
    assert entries(folders[place]) == [entry for entry in wanted if ".tar" not in entry]
    server.files.clear()
    assert load(name, argument).fingerprint == fingerprint


@pytest.mark.parametrize("fault", ["absent", "altered", "truncated"])
@pytest.mark.parametrize("name", WRITE)
def test_failed_download_leaves_no_files(monkeypatch, folders, server, tmp_path, name, fault):
    serve(monkeypatch, server, name, tmp_path / "remote")
    path = list(server.files)[-1]
    if fault == "absent":
        del server.files[path]
    elif fault == "altered":
        server.files[path] = server.files[path][:-1] + b"!"
    else:
        server.truncated.add(path)
    reason = "404" if fault == "absent" else "(IncompleteRead|does not match the known hash)"
    with pytest.raises(DataError, match=f"(?s){name} was not found and could not be .*{reason}"):
        load(name, folders["argument"])
    assert entries(folders["argument"]) == []


def test_next_mirror_is_tried(monkeypatch, server, tmp_path):
    fingerprint = serve(monkeypatch, server, "mnist", tmp_path / "remote", ("first", "second"))
    del server.files["/first/train-images-idx3-ubyte.gz"]
    server.files["/first/t10k-images-idx3-ubyte.gz"] = gzip.compress(b"altered")
    assert load("mnist").fingerprint == fingerprint


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_folder_that_does_not_exist_is_not_created(tmp_path, name):
    missing = tmp_path / "mispelt"
    with pytest.raises(DataError, match=r"data_dir='.*mispelt' is not a folder: check its name"):
        load(name, missing)
    assert not missing.exists()


# Records name their data by the fingerprint: it must stay that of the published records.
@pytest.mark.parametrize(
    ("name", "fingerprint"), [("mnist", "7ea4b60ae284dd63"), ("cifar10", "58faef7e467ee086")]
)
def test_fingerprints_are_those_of_the_published_records(real_data, name, fingerprint):
    assert load(name, real_data, download=False).fingerprint.startswith(fingerprint)
