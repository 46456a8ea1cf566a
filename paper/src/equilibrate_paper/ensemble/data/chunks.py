"""Pass over a whole data set in chunks, and choose the size of a chunk."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equilibrate_paper.ensemble.data.examples import IndexedInputs, PackedImages, PreparedInputs

_EXAMPLES_ON_CPU = 1_000
_EXAMPLES_ON_GPU = 10_000
# Outputs of all layers and replicas that a gradient may have to keep: 8 GiB of float32.
_OUTPUTS_ON_GPU = 1 << 31


def in_chunks(
    data: PreparedInputs, targets: Tensor, size: int, replicas: int, *, as_indices: bool
) -> Iterator[tuple[Tensor | IndexedInputs, Tensor]]:
    """Iterate over a data set in chunks, the same for all replicas and without copies.

    Args:
        data: The prepared inputs, (N, …).
        targets: The targets, (N, …).
        size: Examples in a chunk.
        replicas: Number of replicas, R.
        as_indices: Return the inputs as indices into `data`.

    Yields:
        Inputs and targets of a chunk, (R, B, …).
    """
    inputs = data.images if isinstance(data, PackedImages) else data
    places = torch.arange(len(inputs), device=targets.device)
    for start, y in zip(range(0, len(inputs), size), targets.split(size), strict=True):
        some = slice(start, start + size)
        if inputs is data and not as_indices:
            x = inputs[some].expand(replicas, *y.shape[:1], *inputs.shape[1:])
        else:
            x = IndexedInputs(data, places[some].expand(replicas, -1))
        yield x, y.expand(replicas, *y.shape)


def max_chunk_size(model: nn.Module, example: Tensor, replicas: int, device: torch.device) -> int:
    """Choose how many examples to process at once.

    On a GPU these are enough to keep it busy, but not more than fit into memory with the outputs of
    all layers of all replicas.

    Args:
        model: One replica.
        example: The inputs of one example, (1, …).
        replicas: Number of replicas.
        device: The device of the computation.

    Returns:
        The largest number of examples in a chunk.

    Example:
        >>> max_chunk_size(nn.Linear(3, 1), torch.ones(1, 3), 2, torch.device("cuda"))
        10000
    """
    if device.type == "cpu":
        return _EXAMPLES_ON_CPU
    numbers = replicas * count_activations(model, example)
    return max(1, min(_EXAMPLES_ON_GPU, _OUTPUTS_ON_GPU // numbers))


def even_chunk_size(examples: int, largest: int) -> int:
    """Choose a chunk size so that all chunks are equal, if a few more chunks make this possible.

    On a GPU each size needs kernels of its own.

    Args:
        examples: Number of examples in the data set.
        largest: The largest chunk size allowed.

    Returns:
        A chunk size of at most `largest`.

    Example:
        >>> even_chunk_size(50_000, 2_400), even_chunk_size(23, 10)
        (2000, 8)
    """
    chunks = max(1, -(-examples // largest))
    even = (n for n in range(chunks, 2 * chunks) if examples % n == 0)
    return max(1, -(-examples // next(even, chunks)))


@torch.no_grad()
def count_activations(model: nn.Module, example: Tensor) -> int:
    """Count the numbers that one example needs: the inputs and the outputs of all layers.

    Args:
        model: The model. It is not changed.
        example: The inputs of one example, (1, …).

    Returns:
        The number of inputs plus the number of outputs of each layer.

    Example:
        >>> count_activations(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.ones(1, 3))
        7
    """
    counts = [example.numel()]

    def count(_layer: nn.Module, _inputs: Any, output: Any) -> None:
        counts.append(output.numel() if isinstance(output, Tensor) else 0)

    model = copy.deepcopy(model).cpu()
    for layer in model.modules():
        if not any(layer.children()):
            layer.register_forward_hook(count)
    model(example.cpu())
    return sum(counts)
