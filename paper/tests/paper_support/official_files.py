"""Small random data in the layouts of MNIST and CIFAR-10, registered as the official files."""

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equilibrate_paper.data import files
from equilibrate_paper.data.files import Pixels


def random_pixels(shape: tuple[int, int, int], train: int, test: int) -> Pixels:
    rng = np.random.default_rng(0)

    def split(size: int):
        images = rng.integers(0, 256, (size, *shape), np.uint8)
        return images, rng.integers(0, 10, size, np.uint8)

    return Pixels(*split(train), *split(test))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(monkeypatch: pytest.MonkeyPatch, root: Path, compressed: bool = False) -> Pixels:
    pixels = random_pixels((1, 28, 28), train=7, test=3)
    arrays = (pixels[0][:, 0], pixels[1], pixels[2][:, 0], pixels[3])
    write(monkeypatch, "mnist", root, [idx(array) for array in arrays], compressed)
    return pixels


def write_cifar10(monkeypatch: pytest.MonkeyPatch, root: Path) -> Pixels:
    pixels = random_pixels((3, 32, 32), train=10, test=2)
    images = np.concatenate([pixels.train_images, pixels.test_images]).reshape(12, -1)
    labels = np.concatenate([pixels.train_labels, pixels.test_labels])
    rows = np.column_stack([labels, images])
    write(monkeypatch, "cifar10", root, [rows[k : k + 2].tobytes() for k in range(0, 12, 2)])
    return pixels


def write(monkeypatch, name, root, contents, compressed=False):
    source = files.SOURCES[name]
    official = dict(zip(source.files, map(sha256, contents), strict=True))
    monkeypatch.setitem(files.SOURCES, name, replace(source, files=official))
    folder = root / source.folder
    folder.mkdir(parents=True)
    for file, content in zip(official, contents, strict=True):
        if compressed:
            (folder / f"{file}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / file).write_bytes(content)
