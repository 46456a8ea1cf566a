"""What ``load`` gives is what appendix B says, from wherever it is found; nothing by halves."""

import gzip
import shutil
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest
import torch
from support.published_files import publish_cifar, publish_mnist, sha256
from sklearn.datasets import load_digits

from equilibrate.paper.data import datasets as data
from equilibrate.paper.data import formats
from equilibrate.paper.data.datasets import DataError, load


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    """Three empty places to look in, and none that belongs to whoever runs the tests."""
    folders = {place: tmp_path / place for place in ("argument", "environment", "cache")}
    monkeypatch.setenv("EQUILIBRATE_DATA", str(folders["environment"]))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(pooch, "os_cache", lambda project: folders["cache"])
    return folders


def same(left, right):
    return all(
        torch.equal(getattr(left, part), getattr(right, part))
        for part in ("train_images", "train_labels", "test_images", "test_labels")
    )


# ------------------------------------------------------------------------------ preprocessing


def test_digits_are_scikit_learns_standardised_over_the_training_set():
    digits, raw = load("digits"), load_digits()
    train = raw.images[:1500]
    expected = (raw.images - train.mean()) / train.std()
    images = torch.cat([digits.train_images, digits.test_images])
    assert images.shape == (1797, 1, 8, 8)
    np.testing.assert_allclose(images[:, 0], expected, atol=1e-6)
    labels = torch.cat([digits.train_labels, digits.test_labels])
    assert labels.tolist() == raw.target.tolist()
    assert len(digits.train_images) == len(digits.train_labels) == 1500
    assert digits.classes == tuple("0123456789")
    # a run's checkpoint is tied to this
    assert digits.fingerprint.startswith("a1dc5276eb19924f")


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_training_images_have_mean_zero_and_variance_one(monkeypatch, tmp_path, name):
    publish_mnist(monkeypatch, tmp_path)
    images = load(name, tmp_path).train_images.double()
    assert images.mean().abs() < 1e-7
    assert (images.var(correction=0) - 1).abs() < 1e-6


def test_mnist_is_standardised_with_the_training_constants(monkeypatch, tmp_path):
    pixels = publish_mnist(monkeypatch, tmp_path)
    mnist = load("mnist", tmp_path)
    train = pixels.train_images.astype(np.float64)
    for images, raw in (
        (mnist.train_images, pixels.train_images),
        (mnist.test_images, pixels.test_images),
    ):
        np.testing.assert_allclose(images, (raw - train.mean()) / train.std(), atol=1e-6)
    assert mnist.classes == tuple("0123456789")


def test_cifar_pixels_lose_a_half_and_double(monkeypatch, tmp_path):
    pixels = publish_cifar(monkeypatch, tmp_path)
    cifar = load("cifar10", tmp_path)
    for images, raw in (
        (cifar.train_images, pixels.train_images),
        (cifar.test_images, pixels.test_images),
    ):
        np.testing.assert_allclose(images, (raw / 255 - 0.5) * 2, atol=1e-7)
        assert (images.min(), images.max()) == (-1, 1)
    assert cifar.classes[6] == "frog"
    assert len(cifar.classes) == 10


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_labels_follow_their_images_and_types_are_torchs_usual(monkeypatch, tmp_path, name):
    pixels = (publish_mnist if name == "mnist" else publish_cifar)(monkeypatch, tmp_path)
    dataset = load(name, tmp_path)
    assert dataset.train_labels.tolist() == pixels.train_labels.tolist()
    assert dataset.test_labels.tolist() == pixels.test_labels.tolist()
    assert dataset.train_images.shape == pixels.train_images.shape
    assert dataset.train_images.dtype == dataset.test_images.dtype == torch.float32
    assert dataset.train_labels.dtype == dataset.test_labels.dtype == torch.int64


def test_a_dataset_prints_on_one_line():
    assert repr(load("digits")).startswith("Dataset(name='digits', classes=('0', '1',")


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="name='svhn' is not a data set; choose one of digits, "):
        load("svhn")


# -------------------------------------------------------------------------------- fingerprint


def test_the_file_format_leaves_no_trace(monkeypatch, tmp_path):
    publish_mnist(monkeypatch, tmp_path / "plain")
    publish_mnist(monkeypatch, tmp_path / "zipped", zipped=True)
    publish_cifar(monkeypatch, tmp_path / "binary")
    publish_cifar(monkeypatch, tmp_path / "pickled", pickled=True)
    for name, one, other in (("mnist", "plain", "zipped"), ("cifar10", "binary", "pickled")):
        left, right = load(name, tmp_path / one), load(name, tmp_path / other)
        assert same(left, right)
        assert left.fingerprint == right.fingerprint


def test_other_data_have_another_fingerprint(monkeypatch, tmp_path):
    pixels = publish_mnist(monkeypatch, tmp_path)
    prints = {data._fingerprint(pixels)}
    for part in pixels._fields:
        changed = getattr(pixels, part).copy()
        changed.flat[0] ^= 1
        prints.add(data._fingerprint(pixels._replace(**{part: changed})))
    reshaped = pixels._replace(train_images=pixels.train_images.reshape(7, 1, 14, 56))
    prints.add(data._fingerprint(reshaped))
    assert len(prints) == 6


# ------------------------------------------------------------------------------- where it looks


def test_the_argument_comes_before_the_environment_before_the_cache(monkeypatch, places):
    for folder in places.values():
        publish_mnist(monkeypatch, folder)
        (folder / "MNIST/raw/t10k-labels-idx1-ubyte").write_bytes(b"")  # the error says which
    for folder in places.values():
        with pytest.raises(DataError) as caught:
            load("mnist", places["argument"])
        assert str(caught.value).startswith(str(folder))
        shutil.rmtree(folder)


@pytest.mark.parametrize("place", ["argument", "environment", "cache"])
def test_data_are_found_in_each_place(monkeypatch, places, place):
    publish_cifar(monkeypatch, places[place])
    assert load("cifar10", places["argument"], download=False).name == "cifar10"


def test_nothing_found_lists_where_it_looked_and_what_to_do(places):
    with pytest.raises(DataError) as caught:
        load("cifar10", places["argument"], download=False)
    message = str(caught.value)
    assert "cifar10 was not found and was not to be downloaded" in message
    for folder in places.values():
        assert f"\n  {folder}/cifar-10-batches-bin\n  {folder}/cifar-10-batches-py\n" in message
    assert "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz" in message
    assert "EQUILIBRATE_DATA" in message


def test_a_folder_that_is_not_set_is_not_looked_in(monkeypatch, places):
    monkeypatch.setenv("EQUILIBRATE_DATA", "")
    with pytest.raises(DataError) as caught:
        load("mnist", download=False)
    assert str(caught.value).count("MNIST/raw") == 1


# ----------------------------------------------------------------------------------- downloads


class Server(ThreadingHTTPServer):
    """Serves ``files`` (path -> content); of the paths in ``cut_short``, only the first half."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.cut_short: set[str] = set()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


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
        self.wfile.write(
            content[: len(content) // 2] if self.path in self.server.cut_short else content
        )

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
    """Publish ``name`` on every mirror of the server; return the data as loaded from disk."""
    if name == "mnist":
        publish_mnist(monkeypatch, folder, zipped=True)
        files = {f"MNIST/raw/{p.name}": p.read_bytes() for p in (folder / "MNIST/raw").iterdir()}
    else:
        publish_cifar(monkeypatch, folder)
        with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
            archive.add(folder / "cifar-10-batches-bin", "cifar-10-batches-bin")
        files = {"cifar-10-binary.tar.gz": (folder / "cifar-10-binary.tar.gz").read_bytes()}
    for mirror in mirrors:
        server.files |= {f"/{mirror}/{Path(file).name}": files[file] for file in files}
    source = replace(
        data._SOURCES[name],
        downloads={file: sha256(content) for file, content in files.items()},
        mirrors=[f"{server.url}/{mirror}" for mirror in mirrors],
    )
    monkeypatch.setitem(data._SOURCES, name, source)
    return load(name, folder, download=False)


DOWNLOADED = {
    "mnist": ["MNIST", "MNIST/raw", *(f"MNIST/raw/{n}.gz" for n in sorted(formats.MNIST_FILES))],
    "cifar10": [
        "cifar-10-batches-bin",
        *(f"cifar-10-batches-bin/{n}.bin" for n in formats.CIFAR_BATCHES),
    ],
}


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
@pytest.mark.parametrize("place", ["argument", "environment", "cache"])
def test_what_is_nowhere_is_downloaded_to_the_first_place_and_stays_there(
    monkeypatch, places, server, tmp_path, name, place
):
    if place == "cache":
        monkeypatch.delenv("EQUILIBRATE_DATA")
    argument = places["argument"] if place == "argument" else None
    published = serve(monkeypatch, server, name, tmp_path / "remote")
    assert same(load(name, argument), published)
    assert contents(places[place]) == DOWNLOADED[name]
    server.files.clear()
    assert same(load(name, argument), published)


def test_progress_is_drawn_on_the_standard_error_alone(
    monkeypatch, places, server, tmp_path, capfd
):
    serve(monkeypatch, server, "cifar10", tmp_path / "remote")
    load("cifar10", progress=True)
    output = capfd.readouterr()
    assert output.out == ""
    size = len(server.files["/mirror/cifar-10-binary.tar.gz"])
    assert "cifar-10-binary.tar.gz" in output.err
    assert f"{size / 1000:.1f}/{size / 1000:.1f} kB" in output.err


def test_without_progress_nothing_is_written(monkeypatch, server, tmp_path, capfd, caplog):
    serve(monkeypatch, server, "cifar10", tmp_path / "remote")
    logger = pooch.get_logger()
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    level = logger.level
    load("cifar10")
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert logger.level == level


@pytest.mark.parametrize("fault", ["absent", "altered", "cut short"])
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_faulty_download_is_refused_and_leaves_nothing(
    monkeypatch, places, server, tmp_path, name, fault
):
    serve(monkeypatch, server, name, tmp_path / "remote")
    path = list(server.files)[-1]
    if fault == "absent":
        del server.files[path]
        wrong = "404"
    elif fault == "altered":
        server.files[path] = server.files[path][:-1] + b"!"
        wrong = "does not match the known hash"
    else:
        server.cut_short.add(path)
        wrong = "(IncompleteRead|does not match the known hash)"
    with pytest.raises(DataError, match=f"(?s){name} was not found and could not be .*{wrong}"):
        load(name, places["argument"])
    assert contents(places["argument"]) == []


def test_the_next_mirror_is_tried(monkeypatch, server, tmp_path):
    published = serve(monkeypatch, server, "mnist", tmp_path / "remote", ("first", "second"))
    del server.files["/first/train-images-idx3-ubyte.gz"]
    server.files["/first/t10k-images-idx3-ubyte.gz"] = gzip.compress(b"altered")
    assert same(load("mnist"), published)


def test_every_mirror_that_failed_is_named(monkeypatch, server, tmp_path):
    serve(monkeypatch, server, "mnist", tmp_path / "remote", ("first", "second"))
    server.files.clear()
    with pytest.raises(DataError, match=r"/first: 404 .*; .*/second: 404 "):
        load("mnist")


def test_no_network_is_one_plain_sentence(monkeypatch, places, server, tmp_path):
    serve(monkeypatch, server, "mnist", tmp_path / "remote")
    server.server_close()
    wanted = rf"mnist was not found and could not be downloaded \(no connection to {server.url}/"
    with pytest.raises(DataError, match=wanted) as caught:
        load("mnist")
    assert f"Looked for it in:\n  {places['environment']}/MNIST/raw\n" in str(caught.value)


def test_what_a_killed_download_leaves_is_not_read(monkeypatch, places, server, tmp_path):
    published = serve(monkeypatch, server, "mnist", tmp_path / "remote")
    remains = places["argument"] / "equilibrate-download-killed"
    shutil.copytree(tmp_path / "remote", remains)
    (remains / "MNIST/raw/t10k-labels-idx1-ubyte.gz").write_bytes(b"half of")
    with pytest.raises(DataError, match="was not found and was not to be downloaded"):
        load("mnist", places["argument"], download=False)
    assert same(load("mnist", places["argument"]), published)


def test_two_downloads_at_once_do_no_harm(monkeypatch, places, server, tmp_path):
    published = serve(monkeypatch, server, "mnist", tmp_path / "remote")
    retrieve = data._retrieve

    def overtaken(*arguments):
        retrieve(*arguments)
        shutil.copytree(tmp_path / "remote/MNIST", places["argument"] / "MNIST", dirs_exist_ok=True)

    monkeypatch.setattr(data, "_retrieve", overtaken)
    assert same(load("mnist", places["argument"]), published)
    assert contents(places["argument"]) == DOWNLOADED["mnist"]


def test_a_place_that_cannot_be_written_is_named(places):
    places["argument"].write_text("a file where a folder should be")
    with pytest.raises(DataError, match=f"could not be downloaded .*{places['argument']}"):
        load("mnist", places["argument"])


# ----------------------------------------------------------------------------------- real data


def test_the_real_mnist(real_data):
    mnist = load("mnist", real_data, download=False)
    # mean and deviation that the literature gives for pixels in [0, 1]
    black, white = float(mnist.train_images.min()), float(mnist.train_images.max())
    assert round(1 / (white - black), 4) == 0.3081
    assert round(-black / (white - black), 4) == 0.1307
    assert mnist.train_images.shape == (60000, 1, 28, 28)
    assert mnist.test_images.shape == (10000, 1, 28, 28)
    assert mnist.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.test_labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]


def test_the_real_cifar10(real_data):
    cifar = load("cifar10", real_data, download=False)
    assert cifar.train_images.shape == (50000, 3, 32, 32)
    assert cifar.test_images.shape == (10000, 3, 32, 32)
    assert torch.bincount(cifar.train_labels).tolist() == [5000] * 10
    assert torch.bincount(cifar.test_labels).tolist() == [1000] * 10
    # the channel means that the literature gives for pixels in [0, 1]
    means = cifar.train_images.mean((0, 2, 3), dtype=torch.float64) / 2 + 0.5
    assert [round(mean, 4) for mean in means.tolist()] == [0.4914, 0.4822, 0.4465]
