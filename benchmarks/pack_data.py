"""Pack MNIST and CIFAR-10 into one small file each, for a machine without the data sets.

    python benchmarks/pack_data.py SOURCE data

SOURCE holds the official files: MNIST/raw/*-ubyte and cifar-10-batches-bin/*.bin. It needs
`equilibrate-paper`, which reads them. Written are data/mnist.xz and data/cifar10.xz with the
training sets.

Pixels keep their five highest bits and are replaced by differences to their neighbours, which LZMA
packs to 0.9 kB for an image of CIFAR-10. `read` undoes the differences.
"""

import argparse
import io
import lzma
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
_BITS = 5
"""Bits that are kept of a pixel."""


def pack(images: Images) -> Images:
    """Return differences of the highest bits: between colours, then along rows and columns.

    Args:
        images: Of shape (…, channels, height, width).
    """
    high = images >> np.uint8(8 - _BITS)
    packed = high.copy()
    if images.shape[-3] == 3:
        packed[..., ::2, :, :] -= high[..., 1:2, :, :]
    packed[..., 1:] -= packed[..., :-1].copy()
    packed[..., 1:, :] -= packed[..., :-1, :].copy()
    return packed & np.uint8((1 << _BITS) - 1)


def unpack(packed: Images) -> Images:
    """Undo `pack`, but for the lowest bits."""
    images = packed.cumsum(-2, dtype=np.uint8).cumsum(-1, dtype=np.uint8)
    if images.shape[-3] == 3:
        images[..., ::2, :, :] += images[..., 1:2, :, :]
    return images << np.uint8(8 - _BITS)


def read(path: Path) -> tuple[Images, NDArray[np.uint8]]:
    """Return images and labels of a packed file."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
        return unpack(arrays["images"]), arrays["labels"]


def main() -> None:
    """Pack the data sets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    from equilibrate_paper.data import files  # not where the packed file is read

    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("mnist", "cifar10"):
        images, labels, *_ = files.read(name, options.source, download=False, progress=False)
        buffer = io.BytesIO()
        np.savez(buffer, images=pack(images), labels=labels)
        path = options.out / f"{name}.xz"
        path.write_bytes(lzma.compress(buffer.getvalue()))
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
