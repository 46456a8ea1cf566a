"""The official files of MNIST and CIFAR-10: find, download, verify and parse them.

A file is used only if its SHA-256 checksum is that of the official one. This is the only check:
the size and the layout of a file with the right checksum are known.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class DataError(Exception):
    """Data that are missing, damaged or not official. The message says how to fix it."""


class Pixels(NamedTuple):
    """Images (N, channels, height, width) and labels as published, in bytes."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


@dataclass(frozen=True)
class Source:
    """The official files of a data set."""

    folder: str
    """The folder that holds the files, relative to a data folder."""
    files: Mapping[str, str]
    """SHA-256 checksum of each file, uncompressed."""
    downloads: Mapping[str, str]
    """SHA-256 checksum of each file to download, by its path relative to the data folder."""
    mirrors: tuple[str, ...]
    """Addresses to download from."""


SOURCES = {
    "mnist": Source(
        folder="MNIST/raw",
        files={
            "train-images-idx3-ubyte": (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
            ),
            "train-labels-idx1-ubyte": (
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
            ),
            "t10k-images-idx3-ubyte": (
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
            ),
            "t10k-labels-idx1-ubyte": (
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
            ),
        },
        downloads={
            "MNIST/raw/train-images-idx3-ubyte.gz": (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
            ),
            "MNIST/raw/train-labels-idx1-ubyte.gz": (
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
            ),
            "MNIST/raw/t10k-images-idx3-ubyte.gz": (
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
            ),
            "MNIST/raw/t10k-labels-idx1-ubyte.gz": (
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
            ),
        },
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "https://storage.googleapis.com/cvdf-datasets/mnist",
        ),
    ),
    "cifar10": Source(
        folder="cifar-10-batches-bin",
        files={
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        downloads={
            "cifar-10-binary.tar.gz": (
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
            )
        },
        mirrors=("https://www.cs.toronto.edu/~kriz",),
    ),
}


def read(
    name: str, data_dir: str | os.PathLike[str] | None, download: bool, progress: bool
) -> Pixels:
    """Read "mnist" or "cifar10" from the first folder that has it, or download it.

    Args:
        name: The data set.
        data_dir: The folder to search first and to download to.
        download: Whether to download the data if no folder has them.
        progress: Whether to say on the standard error what is downloaded.

    Returns:
        The official images and labels.

    Raises:
        DataError: If the data are not found, or a file is not the official one.
    """
    source = SOURCES[name]
    roots = list(_roots(data_dir))
    root = next((root for root in roots if (root / source.folder).is_dir()), None)
    failure = "downloading is disabled"
    if root is None and download:
        try:
            _download(source, roots[0], progress)
            root = roots[0]
        except OSError as error:
            failure = f"could not be downloaded ({error})"
    if root is None:
        searched = "".join(f"\n  {root / source.folder}" for root in roots)
        files = ", ".join(Path(file).name for file in source.downloads)
        raise DataError(
            f"{name} was not found and {failure}. Folders searched:{searched}\n"
            f"Download {files} from {source.mirrors[0]} to one of these folders (unpack "
            "archives), or name the folder that has the files: data_dir, --data-dir on the command "
            "line, or the environment variable EQUILIBRATE_DATA."
        )
    contents = [_verified(root / source.folder / file, sha) for file, sha in source.files.items()]
    return _parse_mnist(contents) if name == "mnist" else _parse_cifar(contents)


def _roots(data_dir: str | os.PathLike[str] | None) -> Iterator[Path]:
    for folder in (data_dir, os.environ.get("EQUILIBRATE_DATA")):
        if folder:
            yield Path(folder).expanduser()
    import pooch

    yield Path(pooch.os_cache("equilibrate"))


def _verified(path: Path, sha256: str) -> bytes:
    # The content of a file, or of the same file with .gz appended to its name.
    fix = f"replace it, or remove the folder {path.parent} to download it again"
    compressed = path.with_name(path.name + ".gz")
    try:
        if compressed.exists() and not path.exists():
            content = gzip.decompress(compressed.read_bytes())
        else:
            content = path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path} ({error}): {fix}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DataError(
            f"{path} is damaged or not the official file (SHA-256 {found}, expected {sha256}): "
            f"{fix}"
        )
    return content


def _parse_mnist(contents: Sequence[bytes]) -> Pixels:
    # IDX: a header of 16 bytes before images and of 8 bytes before labels.
    train, train_labels, test, test_labels = (np.frombuffer(c, np.uint8) for c in contents)
    shape = (-1, 1, 28, 28)
    return Pixels(
        train[16:].reshape(shape), train_labels[8:], test[16:].reshape(shape), test_labels[8:]
    )


def _parse_cifar(contents: Sequence[bytes]) -> Pixels:
    # Each image is a label and 32·32 red, green and blue values.
    train, test = b"".join(contents[:-1]), contents[-1]
    train, test = (np.frombuffer(part, np.uint8).reshape(-1, 3073) for part in (train, test))
    shape = (-1, 3, 32, 32)
    return Pixels(train[:, 1:].reshape(shape), train[:, 0], test[:, 1:].reshape(shape), test[:, 0])


def _download(source: Source, root: Path, progress: bool) -> None:
    # Download to a temporary folder and rename it at the end, so that no partial data remain.
    root.mkdir(parents=True, exist_ok=True)
    folder = root / source.folder
    with tempfile.TemporaryDirectory(prefix="equilibrate-download-", dir=root) as temporary:
        for file, sha256 in source.downloads.items():
            _retrieve(source.mirrors, Path(temporary, file), sha256, progress)
        folder.parent.mkdir(exist_ok=True)
        try:
            Path(temporary, source.folder).replace(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has just created it
                raise


def _retrieve(mirrors: Sequence[str], target: Path, sha256: str, progress: bool) -> None:
    # Download one file from the first mirror that has it, and unpack it if it is an archive.
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")
    failures: list[str] = []
    for mirror in mirrors:
        if progress:
            print(f"downloading {mirror}/{target.name} …", file=sys.stderr)
        try:
            pooch.retrieve(
                url=f"{mirror}/{target.name}",
                known_hash=f"sha256:{sha256}",
                fname=target.name,
                path=target.parent,
                processor=pooch.Untar(extract_dir=".") if ".tar" in target.name else None,
            )
            return
        except requests.ConnectionError:
            failures.append(f"no connection to {mirror}")
        except (OSError, ValueError) as error:  # ValueError: wrong checksum
            failures.append(f"{mirror}: {error}")
    raise OSError("; ".join(failures))
