"""How many examples of a whole data set to take at once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

_EXAMPLES_ON_CPU = 1_000
_EXAMPLES_ON_GPU = 10_000
# Outputs of all layers and replicas at once, 8 GiB: what a gradient may have to keep.
_NUMBERS_ON_GPU = 1 << 31


def chunk_size(model: nn.Module, images: Tensor, replicas: int, device: torch.device) -> int:
    """Examples of `images` to take at once, the same for all replicas.

    On a GPU as many as are sure to fill it, or fewer where the outputs of all layers, for all
    replicas, would take too much memory; if possible so that all chunks are of one size, for which
    kernels are compiled only once.

    >>> chunk_size(nn.Linear(3, 1), torch.ones(60_000, 3), 2, torch.device("cuda"))
    10000
    """
    if device.type == "cpu":
        return _EXAMPLES_ON_CPU
    most = min(_EXAMPLES_ON_GPU, _NUMBERS_ON_GPU // (replicas * activations(model, images[:1])))
    chunks = -(-len(images) // max(1, most))
    even = (n for n in range(chunks, 2 * chunks) if len(images) % n == 0)
    return -(-len(images) // next(even, chunks))


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
