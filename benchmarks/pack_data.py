"""Pack subsets of MNIST and CIFAR-10 into one small file, for a machine without the data sets.

    python benchmarks/pack_data.py SOURCE data/forecast.xz [--images 20000]

SOURCE holds the official files: MNIST/raw/*-ubyte and cifar-10-batches-bin/*.bin. The subsets are
the first images of the training sets. It needs `equilibrate-paper`, which reads them.

Pixels are replaced by differences to their neighbours, which LZMA packs to about 1.7 kB for an
image of CIFAR-10. `read` undoes it.
"""

import argparse
import io
import lzma
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]


def pack(images: Images) -> Images:
    """Return differences modulo 256: between colours, then along rows, then along columns.

    Args:
        images: Of shape (…, channels, height, width).
    """
    packed = images.copy()
    if images.shape[-3] == 3:
        packed[..., ::2, :, :] -= images[..., 1:2, :, :]
    packed[..., 1:] -= packed[..., :-1].copy()
    packed[..., 1:, :] -= packed[..., :-1, :].copy()
    return packed


def unpack(packed: Images) -> Images:
    """Undo `pack`."""
    images = packed.cumsum(-2, dtype=np.uint8).cumsum(-1, dtype=np.uint8)
    if images.shape[-3] == 3:
        images[..., ::2, :, :] += images[..., 1:2, :, :]
    return images


def read(path: Path) -> dict[str, tuple[Images, NDArray[np.uint8]]]:
    """Return images and labels of each data set in a packed file, by name."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
        names = {name.split()[0] for name in arrays.files if name.endswith(" images")}
        return {
            name: (unpack(arrays[f"{name} images"]), arrays[f"{name} labels"]) for name in names
        }


def main() -> None:
    """Pack the data sets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, default=20_000)
    options = parser.parse_args()
    from equilibrate_paper.data import files  # not where the packed file is read

    arrays = {}
    for name in ("mnist", "cifar10"):
        images, labels, *_ = files.read(name, options.source, download=False, progress=False)
        arrays[f"{name} images"] = pack(images[: options.images])
        arrays[f"{name} labels"] = labels[: options.images]
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]  # numpy's own stub
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(lzma.compress(buffer.getvalue()))
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
