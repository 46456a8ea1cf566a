"""Access to a training set in chunks, in random mini-batches and in reshuffled epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from equilibrate.mean_loss import Batch

Data = Batch | Iterable[Batch]
"""(inputs, targets) of all examples, or an iterable of such batches, for example a `DataLoader`."""


class TrainingData:
    """A training set, given as tensors or as an iterable of batches.

    The global random state is restored after a `DataLoader` has drawn from it.

    Args:
        data: (inputs, targets), or an iterable of such batches that can be iterated repeatedly.

    Raises:
        ValueError: If inputs and targets are empty or differ in length.
        TypeError: If `data` has another type, or is an iterator.

    Example:
        >>> data = TrainingData((torch.arange(5.0)[:, None], torch.zeros(5)))
        >>> [len(inputs) for inputs, _ in data.chunks(2)]
        [2, 2, 1]
    """

    def __init__(self, data: Data) -> None:
        self._tensors: Batch | None = None
        self._batches: Iterable[Batch] = ()
        if isinstance(data, tuple) and any(isinstance(part, Tensor) for part in data):
            inputs, targets = check_batch(data)
            if len(inputs) != len(targets) or len(inputs) == 0:
                raise ValueError(
                    f"data has {len(inputs)} inputs and {len(targets)} targets: pass one target "
                    "for each input, and at least one example"
                )
            self._tensors = inputs, targets
        elif isinstance(data, Iterator):
            raise TypeError(
                f"data is a {type(data).__name__}, which can be iterated only once: pass a "
                "list or a DataLoader"
            )
        elif isinstance(data, Tensor) or not isinstance(data, Iterable | Dataset):
            raise TypeError(
                "data must be a tuple (inputs, targets) of tensors, or an iterable of such "
                f"batches, got {type(data).__name__}"
            )
        elif isinstance(data, Dataset):
            raise TypeError(
                f"data is a {type(data).__name__}, which consists of single examples: pass "
                "DataLoader(data, batch_size=…)"
            )
        else:
            self._batches = cast(Iterable[Batch], data)

    def chunks(self, chunk_size: int) -> Iterator[Batch]:
        """Iterate over all examples once.

        Args:
            chunk_size: Maximum number of examples in a chunk.

        Yields:
            The chunks.
        """
        for inputs, targets in self._pass():
            yield from zip(inputs.split(chunk_size), targets.split(chunk_size), strict=True)

    def mini_batches(
        self, batch_size: int | None, draws: int, generator: torch.Generator
    ) -> Iterator[Batch]:
        """Draw mini-batches.

        Mini-batches of tensors are independent, and each is drawn without replacement. The batches
        of an iterable are used in its order, and the iterable is restarted when it is exhausted;
        a `DataLoader` with `shuffle=True` then has a new order.

        Args:
            batch_size: Number of examples in a mini-batch; None for an iterable.
            draws: Number of mini-batches.
            generator: Source of the draws.

        Yields:
            The mini-batches.

        Raises:
            ValueError: If `batch_size` does not fit the data.
        """
        if self._tensors is None:
            if batch_size is not None:
                raise ValueError(
                    f"batch_size must be None for data that is an iterable of batches, got "
                    f"{batch_size}: pass None, or (inputs, targets) tensors as data"
                )
            yield from self._cycled(draws, generator)
            return
        inputs, targets = self._tensors
        if batch_size is None or not 1 <= batch_size <= len(inputs):
            raise ValueError(f"batch_size must be between 1 and {len(inputs)}, got {batch_size}")
        for _ in range(draws):
            order = torch.randperm(len(inputs), generator=generator)
            chosen = order[:batch_size].to(inputs.device)
            yield inputs[chosen], targets[chosen.to(targets.device)]

    def epochs(self, batch_size: int, generator: torch.Generator) -> Iterator[Iterator[Batch]]:
        """Iterate over reshuffled epochs, without end.

        Args:
            batch_size: Number of examples in a mini-batch. The last, incomplete one is dropped.
            generator: Source of the orders.

        Yields:
            The mini-batches of one epoch.

        Raises:
            TypeError: If the data is an iterable of batches.
        """
        if self._tensors is None:
            raise TypeError(
                "reshuffled epochs require data as tensors, got an iterable of batches: pass "
                "(inputs, targets)"
            )
        inputs, targets = self._tensors
        while True:
            order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
            whole = order[: len(order) // batch_size * batch_size].split(batch_size)
            yield ((inputs[chosen], targets[chosen.to(targets.device)]) for chosen in whole)

    def _pass(self, seed: int | None = None) -> Iterator[Batch]:
        # A seed is set in the global generator, from which a DataLoader draws its order.
        if self._tensors is not None:
            yield self._tensors
            return
        seen = False
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            for batch in self._batches:
                seen = True
                yield check_batch(batch)
        if not seen:
            raise ValueError(
                "data yields no batch: pass a list or a DataLoader that is not empty and can be "
                "iterated repeatedly"
            )

    def _cycled(self, draws: int, generator: torch.Generator) -> Iterator[Batch]:
        """Yield batches of the iterable, restarting it as often as needed."""
        drawn = 0
        while drawn < draws:
            seed = int(torch.randint(1 << 62, (), generator=generator))
            for pair in self._pass(seed):
                if drawn == draws:
                    return
                yield pair
                drawn += 1


def check_batch(batch: object) -> Batch:
    """Check that an object is a batch.

    Args:
        batch: The object.

    Returns:
        The batch, (inputs, targets).

    Raises:
        TypeError: If it is not a pair of tensors with the examples on the first axis.
    """
    match batch:
        case (Tensor() as inputs, Tensor() as targets) if inputs.ndim and targets.ndim:
            return inputs, targets
    raise TypeError(
        "a batch must be a pair (inputs, targets) of tensors with the examples on the first axis, "
        f"got {describe(batch)}"
    )


def describe(found: object) -> str:
    """Describe the type of an object, and those of the members of a tuple or list.

    Args:
        found: The object.

    Returns:
        A short text.

    Example:
        >>> describe((torch.zeros(2, 3), [1]))
        'tuple (Tensor of shape (2, 3), list (int))'
    """
    if isinstance(found, Tensor):
        return f"Tensor of shape {tuple(found.shape)}"
    if isinstance(found, tuple | list):
        parts = [describe(part) for part in found[:3]] + ["…"] * (len(found) > 3)
        return f"{type(found).__name__} ({', '.join(parts)})"
    return type(found).__name__
