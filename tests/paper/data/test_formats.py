"""Official files are read to the byte; whatever is wrong with one is named, with the remedy."""

import gzip
import io
import math
import os
import pickle
import re
import struct

import numpy as np
import pytest
from support.published_files import (
    idx,
    publish_cifar,
    publish_mnist,
    python2_pickle,
    python2_string,
)

from equilibrate.paper.data.formats import CIFAR_BATCHES, MNIST_FILES, DataError, read_cifar_binary, read_cifar_python, read_mnist

IMAGES = "train-images-idx3-ubyte"


def assert_same(found, published):
    for array, expected in zip(found, published, strict=True):
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, expected)


def flip_last_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def refusal(read, path):
    """Read the folder of ``path``; return the message, which must name the file and a remedy."""
    with pytest.raises(DataError) as caught:
        read(path.parent)
    message = str(caught.value)
    assert message.startswith(f"{path} ")
    assert f"remove the folder {path.parent} to have it downloaded afresh" in message
    return message


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_read_to_the_byte(monkeypatch, tmp_path, zipped):
    published = publish_mnist(monkeypatch, tmp_path, zipped)
    assert_same(read_mnist(tmp_path / "MNIST/raw"), published)


def test_a_plain_file_is_preferred_to_its_gz(monkeypatch, tmp_path):
    published = publish_mnist(monkeypatch, tmp_path)
    (tmp_path / "MNIST/raw" / f"{IMAGES}.gz").write_bytes(b"not even gzip")
    assert_same(read_mnist(tmp_path / "MNIST/raw"), published)


@pytest.mark.parametrize("pickled", [False, True])
def test_cifar_is_read_to_the_byte(monkeypatch, tmp_path, pickled):
    published = publish_cifar(monkeypatch, tmp_path, pickled)
    read = read_cifar_python if pickled else read_cifar_binary
    (folder,) = tmp_path.iterdir()
    assert_same(read(folder), published)


def test_the_pickles_of_these_tests_are_what_pickle_reads():
    images, labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2), np.array([3, 9])
    content = python2_pickle(images, labels)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if name == "dtype":
                return lambda code, align, copy: np.dtype(code.decode(), bool(align), bool(copy))
            return super().find_class(module.replace(".core.", "._core."), name)

    batch = Unpickler(io.BytesIO(content), encoding="bytes").load()
    assert list(batch) == [b"batch_label", b"labels", b"data", b"filenames"]
    assert batch[b"labels"] == [3, 9]
    np.testing.assert_array_equal(batch[b"data"], images.reshape(2, 12))


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (lambda b: b"", "has 0 bytes, too few for its 16-byte header"),
        (lambda b: b[:15], "has 15 bytes, too few for its 16-byte header"),
        (lambda b: b[:-1], "has 5503 bytes unpacked, expected 5504"),
        (lambda b: b + b"\0", "has 5505 bytes unpacked, expected 5504"),
        (lambda b: idx(np.zeros(20, np.uint8)), "is not IDX: magic number 2049, expected 2051"),
        (lambda b: b"<html>" + b[6:], "is not IDX: magic number 1013478509, expected 2051"),
        (
            lambda b: b[:4] + struct.pack(">I", 6) + b[8:],
            r"holds an array of shape \(6, 28, 28\), expected \(7, 28, 28\)",
        ),
        (flip_last_bit, "damaged, or another data set: the SHA-256 sum .* is .*, expected "),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_damaged_idx_file_is_refused(monkeypatch, tmp_path, zipped, damage, wrong):
    publish_mnist(monkeypatch, tmp_path, zipped)
    path = tmp_path / "MNIST/raw" / (f"{IMAGES}.gz" if zipped else IMAGES)
    content = path.read_bytes()
    damaged = damage(gzip.decompress(content) if zipped else content)
    path.write_bytes(gzip.compress(damaged) if zipped else damaged)
    assert re.search(wrong, refusal(read_mnist, path))


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-9],  # within the last block
        lambda b: b[:-3],  # within the checksum
        lambda b: b[: len(b) // 2] + b"spoiled" + b[len(b) // 2 + 7 :],
        lambda b: b[:10] + b"\x07" + b[11:],  # no such kind of block
        lambda b: b"not gzip at all",
    ],
)
def test_a_damaged_gzip_file_is_refused(monkeypatch, tmp_path, damage):
    publish_mnist(monkeypatch, tmp_path, zipped=True)
    path = tmp_path / "MNIST/raw" / f"{IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    assert "is not a whole gzip file: " in refusal(read_mnist, path)


@pytest.mark.parametrize("name", MNIST_FILES)
def test_a_missing_idx_file_is_named(monkeypatch, tmp_path, name):
    publish_mnist(monkeypatch, tmp_path)
    path = tmp_path / "MNIST/raw" / name
    path.unlink()
    assert "is missing" in refusal(read_mnist, path)


@pytest.mark.parametrize("name", CIFAR_BATCHES)
@pytest.mark.parametrize(("read", "suffix"), [(read_cifar_binary, ".bin"), (read_cifar_python, "")])
def test_a_missing_batch_is_named(monkeypatch, tmp_path, read, suffix, name):
    publish_cifar(monkeypatch, tmp_path, pickled=not suffix)
    (folder,) = tmp_path.iterdir()
    path = folder / f"{name}{suffix}"
    path.unlink()
    assert "is missing" in refusal(read, path)


def test_what_cannot_be_read_is_named(monkeypatch, tmp_path):
    publish_mnist(monkeypatch, tmp_path)
    path = tmp_path / "MNIST/raw" / IMAGES
    path.unlink()
    path.mkdir()
    assert "cannot be read: Is a directory" in refusal(read_mnist, path)


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (lambda b: b[:-1], "has 6145 bytes of records, expected 6146"),
        (lambda b: b + b"\0", "has 6147 bytes of records, expected 6146"),
        (flip_last_bit, "damaged, or another data set"),
    ],
)
def test_a_damaged_binary_batch_is_refused(monkeypatch, tmp_path, damage, wrong):
    publish_cifar(monkeypatch, tmp_path)
    path = tmp_path / "cifar-10-batches-bin/data_batch_4.bin"
    path.write_bytes(damage(path.read_bytes()))
    assert wrong in refusal(read_cifar_binary, path)


ONE_IMAGE = np.zeros((1, 3, 32, 32), np.uint8)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"", "not a python batch of CIFAR-10: EOFError"),
        (python2_pickle(ONE_IMAGE, [1])[:-2000], "not a python batch"),
        (b"\x80\x02].", "not a python batch of CIFAR-10: TypeError"),
        (b"\x80\x02}.", "not a python batch of CIFAR-10: KeyError(b'labels')"),
        (python2_pickle(ONE_IMAGE[:, :2], [1]), "not a python batch of CIFAR-10: ValueError"),
        (python2_pickle(ONE_IMAGE, [1, 2]), "not a python batch of CIFAR-10: ValueError"),
        (
            python2_pickle(ONE_IMAGE, [1]).replace(b"K\x01e", b"M\x01\x01e"),
            "not a python batch of CIFAR-10: OverflowError",
        ),
        (python2_pickle(ONE_IMAGE, [1]), "has 3073 bytes of records, expected 6146"),
        (python2_pickle(ONE_IMAGE.repeat(2, 0), [1, 1]), "damaged, or another data set"),
    ],
)
def test_a_damaged_python_batch_is_refused(monkeypatch, tmp_path, content, wrong):
    publish_cifar(monkeypatch, tmp_path, pickled=True)
    path = tmp_path / "cifar-10-batches-py/data_batch_2"
    path.write_bytes(content)
    assert wrong in refusal(read_cifar_python, path)


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("function", "argument", "name"),
    [
        (os.mkdir, "{trap}", f"{os.mkdir.__module__}.mkdir"),
        (eval, "open('{trap}', 'w')", "eval"),
        (np.save, "{trap}", "numpy.save"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused_by_name(
    monkeypatch, tmp_path, function, argument, name, protocol
):
    publish_cifar(monkeypatch, tmp_path, pickled=True)
    path = tmp_path / "cifar-10-batches-py/data_batch_1"
    trap = tmp_path / "sprung"
    call = Call(function, argument.format(trap=trap), *([0] if function is np.save else []))
    path.write_bytes(pickle.dumps({"labels": [call]}, protocol))
    assert f"{name}, which no CIFAR-10 batch contains" in refusal(read_cifar_python, path)
    assert not any(tmp_path.glob("sprung*"))


def test_what_a_pickle_builds_is_inert(monkeypatch, tmp_path):
    """Admitted names never reach numpy: a dtype of objects, or a huge array, is just a note."""
    publish_cifar(monkeypatch, tmp_path, pickled=True)
    path = tmp_path / "cifar-10-batches-py/data_batch_1"
    huge = b"cnumpy\nndarray\n(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft\x85R"
    path.write_bytes(
        b"\x80\x02}(" + python2_string(b"labels") + b"]" + python2_string(b"data") + huge + b"u."
    )
    assert "IndexError" in refusal(read_cifar_python, path)


def test_official_shapes_are_those_of_the_paper():
    """Appendix B: 60 000 MNIST images of 28 by 28, 50 000 CIFAR-10 images of 32 by 32 by 3."""
    train, labels, *test = (file.shape for file in MNIST_FILES.values())
    assert (train, labels, test) == ((60000, 28, 28), (60000,), [(10000, 28, 28), (10000,)])
    *train, test = (file.shape for file in CIFAR_BATCHES.values())
    assert sum(size for size, _ in train) == 50000
    assert test == (10000, 1 + math.prod((32, 32, 3)))
