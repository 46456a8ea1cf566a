"""Digits, MNIST and CIFAR-10 as tensors, preprocessed as in appendix B of the paper."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibrate_paper.data import files
from equilibrate_paper.data.files import DataError, Pixels

__all__ = ["NAMES", "DataError", "Dataset", "load"]

NAMES = ("digits", "mnist", "cifar10")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Preprocessed images (N, channels, height, width) and their labels."""

    train_images: Tensor = field(repr=False)
    """Training images, float32."""
    train_labels: Tensor = field(repr=False)
    """Training labels, int64."""
    test_images: Tensor = field(repr=False)
    """Test images, float32."""
    test_labels: Tensor = field(repr=False)
    """Test labels, int64."""
    fingerprint: str
    """SHA-256 checksum of the pixels and labels as published."""

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """The training set as (inputs, targets)."""
        return self.train_images, self.train_labels

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """The test set as (inputs, targets)."""
        return self.test_images, self.test_labels


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    progress: bool = False,
) -> Dataset:
    """Load "digits", "mnist" or "cifar10" and download it if necessary.

    Pixels of MNIST and the digits become (x − m)/s, with the mean m and the variance s² over all
    pixels of all training images. Pixels of CIFAR-10 become 2(x − ½) with x in [0, 1].

    The digits are part of scikit-learn; the last 297 of them are the test set. The files of the
    other data sets are searched in `data_dir`, in the folder named by the environment variable
    `EQUILIBRATE_DATA`, and in the user's cache folder, as `MNIST/raw/*-ubyte` (or `*-ubyte.gz`) and
    `cifar-10-batches-bin/*.bin`. They are downloaded to the first of these folders.

    >>> digits = load("digits")
    >>> digits.train_images.shape, digits.test_images.shape
    (torch.Size([1500, 1, 8, 8]), torch.Size([297, 1, 8, 8]))

    Args:
        name: The data set.
        data_dir: The folder to search first and to download to. It must exist.
        download: Whether to download files that are not found.
        progress: Whether to say on the standard error what is downloaded.

    Returns:
        The preprocessed data set.

    Raises:
        ValueError: If `name` is unknown.
        DataError: If `data_dir` does not exist.
    """
    if name not in NAMES:
        raise ValueError(f"name={name!r} is not a data set; choose one of {', '.join(NAMES)}")
    if data_dir is not None and not Path(data_dir).expanduser().is_dir():
        raise DataError(
            f"data_dir={os.fspath(data_dir)!r} is not a folder: check its name, or create it to "
            "download the data to it"
        )
    pixels = _digits() if name == "digits" else files.read(name, data_dir, download, progress)
    if name == "cifar10":
        mean, deviation = 255 * 0.5, 255 / 2
    else:
        mean, deviation = _mean_and_deviation(pixels.train_images)
    return Dataset(
        train_images=_standardized(pixels.train_images, mean, deviation),
        train_labels=torch.from_numpy(pixels.train_labels.astype(np.int64)),
        test_images=_standardized(pixels.test_images, mean, deviation),
        test_labels=torch.from_numpy(pixels.test_labels.astype(np.int64)),
        fingerprint=_fingerprint(pixels),
    )


def _digits() -> Pixels:
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images, labels = digits.images[:, None].astype(np.uint8), digits.target.astype(np.uint8)
    # 1500 training images are a whole number of batches of 100.
    return Pixels(images[:1500], labels[:1500], images[1500:], labels[1500:])


def _mean_and_deviation(images: NDArray[np.uint8]) -> tuple[float, float]:
    # Counts of the 256 values are exact, whatever the number of pixels.
    counts = np.bincount(images.ravel(), minlength=256)
    values = np.arange(256)
    mean = float(counts @ values / counts.sum())
    return mean, float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum()))


def _standardized(images: NDArray[np.uint8], mean: float, deviation: float) -> Tensor:
    return torch.from_numpy(images.astype(np.float32)).sub_(mean).div_(deviation)


def _fingerprint(pixels: Pixels) -> str:
    digest = hashlib.sha256()
    for array in pixels:
        digest.update(repr(array.shape).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
