"""Small random data written in the layouts MNIST and CIFAR-10 are published in.

Each ``publish_…`` also declares its files to be the official ones, so that the loader's checks
of shapes and sums pass on them and on nothing else.
"""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from equilibrate.paper.data import formats
from equilibrate.paper.data.formats import Pixels


def random_pixels(shape: tuple[int, int, int], train: int, test: int, seed: int = 0) -> Pixels:
    rng = np.random.default_rng(seed)

    def split(size: int):
        images = rng.integers(0, 256, (size, *shape), np.uint8)
        return images, rng.integers(0, 10, size, np.uint8)

    return Pixels(*split(train), *split(test))


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def records(images: np.ndarray, labels: np.ndarray) -> bytes:
    return b"".join(
        bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)
    )


def python2_string(value: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(value)) + value


def python2_pickle(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Write opcode for opcode what Python 2 wrote into the official batches (less the memos)."""
    size, pixels = len(images), images.reshape(len(images), -1)
    return b"".join(
        [
            b"\x80\x02}(",
            python2_string(b"batch_label") + python2_string(b"training batch 1 of 5"),
            python2_string(b"labels") + b"](" + b"".join(b"K" + bytes([x]) for x in labels) + b"e",
            python2_string(b"data"),
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R",
            b"(K\x01M" + struct.pack("<H", size) + b"M" + struct.pack("<H", pixels.shape[1]),
            b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89",
            python2_string(pixels.tobytes()) + b"tb",
            python2_string(b"filenames") + b"](" + size * python2_string(b"a.png") + b"e",
            b"u.",
        ]
    )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def publish_mnist(
    monkeypatch: pytest.MonkeyPatch, root: Path, zipped: bool = False, seed: int = 0
) -> Pixels:
    pixels = random_pixels((1, 28, 28), train=7, test=3, seed=seed)
    arrays = (pixels[0][:, 0], pixels[1], pixels[2][:, 0], pixels[3])
    folder = root / "MNIST/raw"
    folder.mkdir(parents=True)
    official = {}
    for name, array in zip(formats.MNIST_FILES, arrays, strict=True):
        content = idx(array)
        official[name] = formats._File(array.shape, sha256(content))
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    monkeypatch.setattr(formats, "MNIST_FILES", official)
    return pixels


def publish_cifar(
    monkeypatch: pytest.MonkeyPatch, root: Path, pickled: bool = False, seed: int = 0
) -> Pixels:
    pixels = random_pixels((3, 32, 32), train=10, test=2, seed=seed)
    folder = root / ("cifar-10-batches-py" if pickled else "cifar-10-batches-bin")
    folder.mkdir(parents=True)
    images = np.concatenate([pixels.train_images, pixels.test_images])
    labels = np.concatenate([pixels.train_labels, pixels.test_labels])
    official = {}
    for number, name in enumerate(formats.CIFAR_BATCHES):
        batch = slice(2 * number, 2 * number + 2)
        content = records(images[batch], labels[batch])
        official[name] = formats._File((2, 3073), sha256(content))
        if pickled:
            (folder / name).write_bytes(python2_pickle(images[batch], labels[batch]))
        else:
            (folder / f"{name}.bin").write_bytes(content)
    monkeypatch.setattr(formats, "CIFAR_BATCHES", official)
    return pixels
