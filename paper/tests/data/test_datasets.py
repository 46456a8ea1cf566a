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

from equilibrate_paper.data import datasets, files
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


def test_fingerprint_depends_on_every_array_and_its_shape(monkeypatch, tmp_path):
    pixels = write_mnist(monkeypatch, tmp_path)
    fingerprints = {datasets._fingerprint(pixels)}
    for part in pixels._fields:
        changed = getattr(pixels, part).copy()
        changed.flat[0] ^= 1
        fingerprints.add(datasets._fingerprint(pixels._replace(**{part: changed})))
    reshaped = pixels.train_images.reshape(7, 1, 14, 56)
    fingerprints.add(datasets._fingerprint(pixels._replace(train_images=reshaped)))
    assert len(fingerprints) == 6


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


@pytest.mark.parametrize("progress", [False, True])
def test_download_says_what_it_does_if_it_shall(monkeypatch, server, tmp_path, capfd, progress):
    serve(monkeypatch, server, "cifar10", tmp_path / "remote")
    load("cifar10", progress=progress)
    output = capfd.readouterr()
    assert output.out == ""
    assert ("downloading" in output.err) == ("cifar-10-binary.tar.gz" in output.err) == progress


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


def test_error_names_every_mirror(monkeypatch, server, tmp_path):
    serve(monkeypatch, server, "mnist", tmp_path / "remote", ("first", "second"))
    server.files.clear()
    with pytest.raises(DataError, match=r"/first: 404 .*; .*/second: 404 "):
        load("mnist")


def test_folder_that_cannot_be_written_is_named(folders):
    folders["environment"].write_text("a file instead of a folder")
    with pytest.raises(DataError, match=f"could not be downloaded .*{folders['environment']}"):
        load("mnist")


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_folder_that_does_not_exist_is_not_created(tmp_path, name):
    missing = tmp_path / "mispelt"
    with pytest.raises(DataError, match=r"data_dir='.*mispelt' is not a folder: check its name"):
        load(name, missing)
    assert not missing.exists()


def test_real_mnist(real_data):
    mnist = load("mnist", real_data, download=False)
    # mean and deviation that the literature gives for pixels in [0, 1]
    black, white = float(mnist.train_images.min()), float(mnist.train_images.max())
    assert round(1 / (white - black), 4) == 0.3081
    assert round(-black / (white - black), 4) == 0.1307
    assert mnist.train_images.shape == (60000, 1, 28, 28)
    assert mnist.test_images.shape == (10000, 1, 28, 28)
    assert mnist.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.test_labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]


def test_real_cifar10(real_data):
    cifar = load("cifar10", real_data, download=False)
    assert cifar.train_images.shape == (50000, 3, 32, 32)
    assert cifar.test_images.shape == (10000, 3, 32, 32)
    assert torch.bincount(cifar.train_labels).tolist() == [5000] * 10
    assert torch.bincount(cifar.test_labels).tolist() == [1000] * 10
    # the channel means that the literature gives for pixels in [0, 1]
    means = cifar.train_images.mean((0, 2, 3), dtype=torch.float64) / 2 + 0.5
    assert [round(mean, 4) for mean in means.tolist()] == [0.4914, 0.4822, 0.4465]


# Records name their data by the fingerprint: it must stay that of the published records.
@pytest.mark.parametrize(
    ("name", "fingerprint"), [("mnist", "7ea4b60ae284dd63"), ("cifar10", "58faef7e467ee086")]
)
def test_fingerprints_are_those_of_the_published_records(real_data, name, fingerprint):
    assert load(name, real_data, download=False).fingerprint.startswith(fingerprint)
