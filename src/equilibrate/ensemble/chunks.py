"""A whole data set in chunks, and how many examples to take at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equilibrate.ensemble._ops import PackedImages
from equilibrate.ensemble.batches import DataSet, Examples

_EXAMPLES_ON_CPU = 1_000
_EXAMPLES_ON_GPU = 10_000
# Outputs of all layers and replicas at once, 8 GiB: what a gradient may have to keep.
_NUMBERS_ON_GPU = 1 << 31


def in_chunks(
    data_set: DataSet, labels: Tensor, size: int, replicas: int, gathers: bool
) -> Iterator[tuple[Tensor | Examples, Tensor]]:
    """Images and labels, `size` of them at a time, the same for all replicas and without copies.

    A network that `gathers` gets them by their places in the data set.
    """
    images = data_set.images if isinstance(data_set, PackedImages) else data_set
    places = torch.arange(len(images), device=labels.device)
    for start, y in zip(range(0, len(images), size), labels.split(size), strict=True):
        some = slice(start, start + size)
        if images is data_set and not gathers:
            x = images[some].expand(replicas, *y.shape[:1], *images.shape[1:])
        else:
            x = Examples(data_set, places[some].expand(replicas, -1))
        yield x, y.expand(replicas, *y.shape)


def most_at_once(model: nn.Module, image: Tensor, replicas: int, device: torch.device) -> int:
    """Examples like `image` (1, …) to take at once, the same for all replicas.

    On a GPU as many as are sure to fill it, or fewer where the outputs of all layers, for all
    replicas, would take too much memory.

    >>> most_at_once(nn.Linear(3, 1), torch.ones(1, 3), 2, torch.device("cuda"))
    10000
    """
    if device.type == "cpu":
        return _EXAMPLES_ON_CPU
    numbers = replicas * activations(model, image)
    return max(1, min(_EXAMPLES_ON_GPU, _NUMBERS_ON_GPU // numbers))


def even_chunk(examples: int, most: int) -> int:
    """A size of chunks, of one size if possible: on a GPU each size has kernels of its own.

    >>> even_chunk(50_000, 2_400), even_chunk(23, 10)
    (2000, 8)
    """
    chunks = max(1, -(-examples // most))
    even = (n for n in range(chunks, 2 * chunks) if examples % n == 0)
    return max(1, -(-examples // next(even, chunks)))


@torch.no_grad()
def activations(model: nn.Module, image: Tensor) -> int:
    """How many numbers go into a model and its layers put out, for one example (1, …).

    >>> activations(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.ones(1, 3))
    7
    """
    counts = [image.numel()]

    def count(_layer: nn.Module, _inputs: Any, output: Any) -> None:
        counts.append(output.numel() if isinstance(output, Tensor) else 0)

    model = copy.deepcopy(model).cpu()
    for layer in model.modules():
        if not any(layer.children()):
            layer.register_forward_hook(count)
    model(image.cpu())
    return sum(counts)
