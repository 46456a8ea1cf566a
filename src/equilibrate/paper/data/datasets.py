"""Digits, MNIST and CIFAR-10 as tensors, preprocessed as in appendix B of the paper."""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibrate.paper.data.formats import DataError, Pixels, read_cifar_binary, read_cifar_python, read_mnist

__all__ = ["NAMES", "DataError", "Dataset", "load"]

NAMES = ("digits", "mnist", "cifar10")


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification task: preprocessed images (N, channels, height, width) and their labels.

    ``fingerprint`` is a SHA-256 sum over pixels and labels as published: two data sets with one
    fingerprint are the same, whichever file format they were read from.
    """

    name: str
    train_images: Tensor = field(repr=False)
    train_labels: Tensor = field(repr=False)
    test_images: Tensor = field(repr=False)
    test_labels: Tensor = field(repr=False)
    classes: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True)
class _Source:
    """Where a data set is found (folder -> its reader) and where it is downloaded from.

    The first folder is the one that the downloads, file name -> SHA-256 sum, make.
    """

    folders: Mapping[str, Callable[[Path], Pixels]]
    downloads: Mapping[str, str]
    mirrors: Sequence[str]


_SOURCES = {
    "mnist": _Source(
        folders={"MNIST/raw": read_mnist},
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
    "cifar10": _Source(
        folders={
            "cifar-10-batches-bin": read_cifar_binary,
            "cifar-10-batches-py": read_cifar_python,
        },
        downloads={
            "cifar-10-binary.tar.gz": (
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
            )
        },
        mirrors=("https://www.cs.toronto.edu/~kriz",),
    ),
}


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    progress: bool = False,
) -> Dataset:
    """Load ``"digits"``, ``"mnist"`` or ``"cifar10"``, downloading it where it is nowhere found.

    MNIST and the digits become (x − m)/s, with the mean m and the variance s² taken over all
    pixels of all training images; CIFAR-10 becomes 2(x − ½) with x in [0, 1].

    Digits come with scikit-learn; the last 297 are the test set. The others are looked for in
    ``data_dir``, in the folder that the environment variable ``EQUILIBRATE_DATA`` names, and in
    the user's cache, as ``MNIST/raw/*-ubyte`` (or ``.gz``), ``cifar-10-batches-bin/*.bin`` or
    ``cifar-10-batches-py/*``. What is nowhere found is downloaded to the first of these folders,
    whole and checked or not at all; ``progress`` draws a bar meanwhile, on the standard error.

    >>> digits = load("digits")
    >>> digits.train_images.shape, digits.test_images.shape
    (torch.Size([1500, 1, 8, 8]), torch.Size([297, 1, 8, 8]))
    >>> digits.train_images.dtype, digits.train_labels.dtype, len(digits.classes)
    (torch.float32, torch.int64, 10)
    """
    if name not in NAMES:
        raise ValueError(f"name={name!r} is not a data set; choose one of {', '.join(NAMES)}")
    pixels = _digits() if name == "digits" else _published(name, data_dir, download, progress)
    if name == "cifar10":
        # in [0, 1], then as the paper has it: less 0.5, times 2
        offset, scale = 255 * 0.5, 255 / 2
        classes = "airplane automobile bird cat deer dog frog horse ship truck"
    else:
        offset, scale = _mean_and_deviation(pixels.train_images)
        classes = "0 1 2 3 4 5 6 7 8 9"
    return Dataset(
        name=name,
        train_images=_affine(pixels.train_images, offset, scale),
        train_labels=torch.from_numpy(pixels.train_labels.astype(np.int64)),
        test_images=_affine(pixels.test_images, offset, scale),
        test_labels=torch.from_numpy(pixels.test_labels.astype(np.int64)),
        classes=tuple(classes.split()),
        fingerprint=_fingerprint(pixels),
    )


def _mean_and_deviation(images: NDArray[np.uint8]) -> tuple[float, float]:
    """Return mean and standard deviation over images and pixels, from exact counts of levels."""
    counts = np.bincount(images.ravel(), minlength=256)
    levels = np.arange(256)
    mean = float(counts @ levels / counts.sum())
    return mean, float(np.sqrt(counts @ (levels - mean) ** 2 / counts.sum()))


def _affine(images: NDArray[np.uint8], offset: float, scale: float) -> Tensor:
    return torch.from_numpy(images.astype(np.float32)).sub_(offset).div_(scale)


def _fingerprint(pixels: Pixels) -> str:
    digest = hashlib.sha256()
    for array in pixels:
        digest.update(repr(array.shape).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _digits() -> Pixels:
    """Return scikit-learn's 1797 digits: 1500 to train on, a whole number of batches of 100."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images, labels = digits.images[:, None].astype(np.uint8), digits.target.astype(np.uint8)
    return Pixels(images[:1500], labels[:1500], images[1500:], labels[1500:])


def _published(
    name: str, data_dir: str | os.PathLike[str] | None, download: bool, progress: bool
) -> Pixels:
    """Read a data set from the first folder that has it, or download it to the first of all."""
    source = _SOURCES[name]
    places: list[tuple[Path, Callable[[Path], Pixels]]] = []
    for root in _roots(data_dir):
        for folder, read in source.folders.items():
            places.append((root / folder, read))
            if os.path.isdir(root / folder):
                return read(root / folder)
    failure = "was not to be downloaded"
    if download:
        try:
            _download(source, next(_roots(data_dir)), progress)
        except OSError as error:
            failure = f"could not be downloaded ({error})"
        else:
            folder, read = places[0]
            return read(folder)
    looked = "".join(f"\n  {folder}" for folder, _ in places)
    files = ", ".join(Path(file).name for file in source.downloads)
    raise DataError(
        f"{name} was not found and {failure}. Looked for it in:{looked}\n"
        f"Put the official files there by hand ({files} from {source.mirrors[0]}; archives "
        "unpacked), or give the folder that holds them as data_dir or in the environment "
        "variable EQUILIBRATE_DATA."
    )


def _roots(data_dir: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Where to look, in this order."""
    for named in (data_dir, os.environ.get("EQUILIBRATE_DATA")):
        if named:
            yield Path(named).expanduser()
    import pooch  # not needed where a named folder has the data

    yield Path(pooch.os_cache("equilibrate"))


def _download(source: _Source, root: Path, progress: bool) -> None:
    """Make the source's first folder under ``root``: whole and checked, or not at all.

    Everything happens in a scratch folder beside it that is renamed at the end, so that a
    download cut short at any moment leaves nothing that could be read.
    """
    folder = next(iter(source.folders))
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="equilibrate-download-", dir=root) as scratch:
        for file, sha256 in source.downloads.items():
            _retrieve(source.mirrors, Path(scratch, file), sha256, progress)
        (root / folder).parent.mkdir(exist_ok=True)
        try:
            Path(scratch, folder).replace(root / folder)
        except OSError:
            if not (root / folder).is_dir():  # else another process has just put it there
                raise


def _retrieve(mirrors: Sequence[str], target: Path, sha256: str, progress: bool) -> None:
    """Download one file, from the first mirror that gives it right, and unpack an archive."""
    import pooch
    import requests

    failures: list[str] = []
    for mirror in mirrors:
        try:
            with (
                _quiet(pooch.get_logger()),
                _Bar(target.name) if progress else nullcontext() as bar,
            ):
                downloader: Any = pooch.HTTPDownloader(cast(Any, bar), chunk_size=2**16)
                pooch.retrieve(
                    url=f"{mirror}/{target.name}",
                    known_hash=f"sha256:{sha256}",
                    fname=target.name,
                    path=target.parent,
                    processor=pooch.Untar(extract_dir=".") if ".tar" in target.name else None,
                    downloader=downloader,
                )
            return
        except requests.ConnectionError:
            failures.append(f"no connection to {mirror}")
        except (OSError, ValueError) as error:  # ValueError: the checksum differs
            failures.append(f"{mirror}: {error}")
    raise OSError("; ".join(failures))


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence what would be written across the progress bar."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Bar:
    """What pooch asks of a progress bar (total, update, reset, close), drawn by rich."""

    def __init__(self, description: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        self._bar = Progress(
            "{task.description}",
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(description, total=None)

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def total(self) -> float | None:
        return self._bar.tasks[0].total

    @total.setter
    def total(self, value: int) -> None:
        self._bar.update(self._task, total=value or None)

    def update(self, amount: int) -> None:
        self._bar.advance(self._task, amount)

    def reset(self) -> None:
        self._bar.update(self._task, completed=0)

    def close(self) -> None:
        self._bar.refresh()
