"""Training, validation and test examples of a task, from a file that `pack_data.py --study` wrote.

Settings are chosen on validation examples, results are from test examples. Of images the last ones
of the packed training set are for validation; of the held-out text the first half.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pack_data
import torch
from torch import Tensor

VALIDATION = {"mnist": 2000, "cifar10": 1500}
"""Images of the packed training set that are for validation."""


@dataclass(frozen=True)
class Split:
    """Some examples: images with labels, or one text of which every byte is a target."""

    inputs: Tensor
    """Pixels or bytes, as integers from 0 to 255."""
    labels: Tensor
    """Empty for a text."""

    def to(self, device: str) -> "Split":
        """Move the examples to a device."""
        return Split(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Data:
    """The examples of a task."""

    train: Split
    validation: Split
    test: Split
    mean: float
    """Mean of the pixels for training."""
    scale: float
    """Their standard deviation."""
    fingerprint: str
    """Identifies all examples."""


def unpacked(path: Path) -> Path:
    """Return the file with the arrays of a packed file, which is written once.

    Decompressing takes seconds, and every run reads the data.
    """
    found = path.with_suffix(".npz")
    if not found.exists() or found.stat().st_mtime < path.stat().st_mtime:
        arrays = dict(pack_data.read_text(path))
        for name, (images, labels) in pack_data.read(path).items():
            arrays |= {f"{name} images": images, f"{name} labels": labels}
        partial = found.with_suffix(".partial.npz")
        np.savez(partial, **arrays)  # pyright: ignore[reportArgumentType]  # numpy's own stub
        partial.replace(found)
    return found


@cache
def load(name: str, path: Path | None) -> Data:
    """Return the examples of "mnist", "cifar10" or "text"; random ones without a file."""
    arrays = _random(name) if path is None else np.load(unpacked(path))
    if name == "text":
        text, held_out = (torch.from_numpy(arrays[part]) for part in ("text", "text-test"))
        half = len(held_out) // 2
        splits = [Split(part, part[:0]) for part in (text, held_out[:half], held_out[half:])]
    else:
        images, labels, test_images, test_labels = (
            torch.from_numpy(arrays[f"{part} {kind}"])
            for part in (name, f"{name}-test")
            for kind in ("images", "labels")
        )
        count = len(images) - min(VALIDATION[name], len(images) // 4)
        splits = [
            Split(images[:count], labels[:count].long()),
            Split(images[count:], labels[count:].long()),
            Split(test_images, test_labels.long()),
        ]
    scale, mean = (
        (1.0, 0.0)
        if name == "text"
        else [float(x) for x in torch.std_mean(splits[0].inputs.float())]
    )
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.inputs.numpy().tobytes() + split.labels.numpy().tobytes())
    train, validation, test = splits
    return Data(train, validation, test, mean, scale, digest.hexdigest()[:16])


def _random(name: str) -> dict[str, np.ndarray]:
    """Return few examples that can be learned to some extent, for tests."""
    random = np.random.default_rng(0)
    if name == "text":
        text = np.frombuffer(b"for each batch: step()\n" * 400, np.uint8).copy()
        noisy = random.random(len(text)) < 0.1
        text[noisy] = random.integers(97, 123, int(noisy.sum()))
        return {"text": text[:6000], "text-test": text[6000:]}
    shape = (1, 28, 28) if name == "mnist" else (3, 32, 32)
    arrays = {}
    for part, count in ((name, 320), (f"{name}-test", 120)):
        labels = random.integers(0, 10, count).astype(np.uint8)
        images = random.integers(0, 160, (count, *shape))
        images[np.arange(count), :, labels, :] += 60  # a bright row for each class
        arrays |= {f"{part} images": images.astype(np.uint8), f"{part} labels": labels}
    return arrays
