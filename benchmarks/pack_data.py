"""Pack subsets of MNIST and CIFAR-10 into one small file, for a machine without the data sets.

    python benchmarks/pack_data.py SOURCE data/forecast.xz [--images 20000]
    python benchmarks/pack_data.py SOURCE data/training.xz --study

SOURCE holds the official files: MNIST/raw/*-ubyte and cifar-10-batches-bin/*.bin. The subsets are
the first images of the training sets. With `--study` they have the sizes of `STUDY`, and the file
also holds the first images of the test sets ("mnist-test", "cifar10-test") and the sources of
Python's standard library, of which every ninth file is held out ("text", "text-test").

Pixels are replaced by differences to their neighbours, which LZMA packs to about 1.7 kB for an
image of CIFAR-10. `read` undoes it.
"""

import argparse
import io
import lzma
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
STUDY = {"mnist": (20_000, 5000), "cifar10": (14_500, 3500)}
"""Images of the training and test sets in the file for `training.py`, about 38 MB."""


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


def read_text(path: Path) -> dict[str, Images]:
    """Return the texts in a packed file as bytes, by name."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
        return {name: arrays[name] for name in arrays.files if name.startswith("text")}


def library_sources() -> dict[str, Images]:
    """Return the sources of Python's standard library, files in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    files = [
        file
        for file in sorted(folder.rglob("*.py"))
        if not left_out & set(file.relative_to(folder).parts)
    ]
    held_out = files[4::9]
    kept = [file for file in files if file not in set(held_out)]

    def joined(chosen: list[Path]) -> Images:
        return np.frombuffer(b"".join(file.read_bytes() for file in chosen), np.uint8)

    return {"text": joined(kept), "text-test": joined(held_out)}


def main() -> None:
    """Pack the data sets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--study", action="store_true", help="what training.py needs")
    options = parser.parse_args()
    from equilibrate_paper.data import files  # not where the packed file is read

    arrays = library_sources() if options.study else {}
    for name, sizes in STUDY.items():
        train, test = sizes if options.study else (options.images, 0)
        found = files.read(name, options.source, download=False, progress=False)
        parts = {name: (*found[:2], train), f"{name}-test": (*found[2:4], test)}
        for part, (images, labels, count) in parts.items():
            if count:
                arrays[f"{part} images"] = pack(images[:count])
                arrays[f"{part} labels"] = labels[:count]
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]  # numpy's own stub
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(lzma.compress(buffer.getvalue()))
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
