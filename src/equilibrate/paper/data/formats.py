"""The files MNIST and CIFAR-10 are published in, read with distrust.

Every file is checked for its size, its header and its SHA-256 sum before a pixel of it is used:
what comes back is the official data, or a ``DataError`` that names the file, what is wrong with
it and what to do.
"""

import gzip
import hashlib
import io
import math
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["DataError", "Pixels", "read_cifar_binary", "read_cifar_python", "read_mnist"]


class DataError(Exception):
    """Data that are missing, damaged or not what they claim to be; the message says what to do."""


class Pixels(NamedTuple):
    """Images (N, channels, height, width) and labels as published, in bytes."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


class _File(NamedTuple):
    """An official file: the shape of the bytes it holds, and its SHA-256 sum when unpacked."""

    shape: tuple[int, ...]
    sha256: str


MNIST_FILES: Mapping[str, _File] = {
    "train-images-idx3-ubyte": _File(
        (60_000, 28, 28), "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
    ),
    "train-labels-idx1-ubyte": _File(
        (60_000,), "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
    ),
    "t10k-images-idx3-ubyte": _File(
        (10_000, 28, 28), "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
    ),
    "t10k-labels-idx1-ubyte": _File(
        (10_000,), "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
    ),
}

# A record is a label byte, then 32·32 red, green and blue ones. The sums are of the binary
# version; the python version holds the same records in the same batches.
CIFAR_IMAGE = (3, 32, 32)
CIFAR_BATCHES: Mapping[str, _File] = {
    name: _File((10_000, 1 + math.prod(CIFAR_IMAGE)), sha256)
    for name, sha256 in {
        "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    }.items()
}


def read_mnist(folder: Path) -> Pixels:
    """Read the four IDX files of ``folder``, each plain or with ``.gz`` behind its name."""
    train, train_labels, test, test_labels = (
        _read_idx(folder / name, file) for name, file in MNIST_FILES.items()
    )
    return Pixels(train[:, None], train_labels, test[:, None], test_labels)


def read_cifar_binary(folder: Path) -> Pixels:
    """Read the six ``.bin`` batches of ``folder``."""
    return _read_cifar(folder, ".bin", lambda path, file: _read(path))


def read_cifar_python(folder: Path) -> Pixels:
    """Read the six pickled batches of ``folder``; no code that a pickle asks for is ever run."""
    return _read_cifar(folder, "", _read_pickled_records)


def _fault(path: Path, wrong: str) -> DataError:
    return DataError(
        f"{path} {wrong}. Put the official file there, "
        f"or remove the folder {path.parent} to have it downloaded afresh."
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise _fault(path, "is missing") from None
    except OSError as error:
        raise _fault(path, f"cannot be read: {error.strerror}") from error


def _check_sum(path: Path, content: bytes, file: _File) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise _fault(
            path,
            f"has the right size but is damaged, or another data set: "
            f"the SHA-256 sum of its contents is {found}, expected {file.sha256}",
        )


def _read_idx(path: Path, file: _File) -> NDArray[np.uint8]:
    """Read an IDX file: a magic number (0, 0, 8 for bytes, the number of axes), sizes, bytes."""
    zipped = path.with_name(path.name + ".gz")
    if os.path.exists(zipped) and not os.path.exists(path):
        path = zipped
        try:
            content = gzip.decompress(_read(path))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _fault(path, f"is not a whole gzip file: {error}") from error
    else:
        content = _read(path)
    expected = (0x0800 + len(file.shape), *file.shape)
    header = struct.Struct(f">{len(expected)}I")
    if len(content) < header.size:
        raise _fault(path, f"has {len(content)} bytes, too few for its {header.size}-byte header")
    magic, *shape = header.unpack_from(content)
    if magic != expected[0]:
        raise _fault(path, f"is not IDX: magic number {magic}, expected {expected[0]}")
    if tuple(shape) != file.shape:
        raise _fault(path, f"holds an array of shape {tuple(shape)}, expected {file.shape}")
    size = header.size + math.prod(file.shape)
    if len(content) != size:
        raise _fault(path, f"has {len(content)} bytes unpacked, expected {size}")
    _check_sum(path, content, file)
    return np.frombuffer(content, np.uint8, offset=header.size).reshape(file.shape)


def _read_cifar(folder: Path, suffix: str, read: Callable[[Path, _File], bytes]) -> Pixels:
    """Read six batches; ``read`` gives the records of one as bytes."""
    batches: list[NDArray[np.uint8]] = []
    for name, file in CIFAR_BATCHES.items():
        path = folder / (name + suffix)
        records = read(path, file)
        size = math.prod(file.shape)
        if len(records) != size:
            raise _fault(path, f"has {len(records)} bytes of records, expected {size}")
        _check_sum(path, records, file)
        batches.append(np.frombuffer(records, np.uint8).reshape(file.shape))
    train, test = np.concatenate(batches[:-1]), batches[-1]
    return Pixels(
        train[:, 1:].reshape(-1, *CIFAR_IMAGE),
        train[:, 0],
        test[:, 1:].reshape(-1, *CIFAR_IMAGE),
        test[:, 0],
    )


class _Inert:
    """Stands for what a pickle asks to be built: it keeps what it is told and runs nothing."""

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Reads containers, strings and numbers; arrays become ``_Inert``, all else is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> type[_Inert]:
        name = f"{module_name}.{global_name}"
        if name not in ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"):
            raise pickle.UnpicklingError(f"it asks for {name}, which no CIFAR-10 batch contains")
        return _Inert


def _read_pickled_records(path: Path, file: _File) -> bytes:
    content = io.BytesIO(_read(path))
    try:
        batch = _InertUnpickler(content, encoding="bytes").load()
        labels = np.array(batch[b"labels"], np.uint8)
        # an array's state: version, shape, dtype, whether in Fortran's order, bytes
        pixels = np.frombuffer(batch[b"data"].state[4], np.uint8)
        records = np.column_stack([labels, pixels.reshape(len(labels), file.shape[1] - 1)])
    except Exception as error:  # a damaged pickle may raise anything
        raise _fault(path, f"is not a python batch of CIFAR-10: {error!r}") from error
    return records.tobytes()
