"""Access to a training set in chunks, in random mini-batches and in reshuffled epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

from equilibrate.landscape.mean_loss import Batch

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
        self._batches: Iterable[object] = ()
        if isinstance(data, tuple) and any(isinstance(part, Tensor) for part in data):
            self._tensors = inputs, targets = check_batch(data)
            if len(inputs) != len(targets) or len(inputs) == 0:
                raise ValueError(
                    f"data has {len(inputs)} inputs and {len(targets)} targets: pass one target "
                    "for each input, and at least one example"
                )
        elif isinstance(data, Iterator | Tensor | Dataset) or not isinstance(data, Iterable):
            raise TypeError(
                "data must be a tuple (inputs, targets) of tensors, or a list or a DataLoader of "
                f"such batches, which can be iterated repeatedly, got {type(data).__name__}"
            )
        else:
            self._batches = data

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
        if self._tensors is not None:
            self.steps_per_epoch(batch_size)
            for _ in range(draws):
                order = torch.randperm(len(self._tensors[0]), generator=generator)
                yield self._chosen(order[:batch_size])
            return
        if batch_size is not None:
            raise ValueError(
                f"batch_size must be None for data that is an iterable of batches, got "
                f"{batch_size}: pass None, or (inputs, targets) tensors as data"
            )
        while draws > 0:
            for batch in self._pass(int(torch.randint(1 << 62, (), generator=generator))):
                yield batch
                draws -= 1
                if draws == 0:
                    return

    def steps_per_epoch(self, batch_size: int | None) -> int:
        """Return the number of whole mini-batches in an epoch.

        Args:
            batch_size: Number of examples in a mini-batch.

        Raises:
            TypeError: If the data is an iterable of batches.
            ValueError: If `batch_size` does not fit the data.
        """
        if self._tensors is None:
            raise TypeError(
                "epochs require data as tensors, got an iterable of batches: pass (inputs, targets)"
            )
        size = len(self._tensors[0])
        if batch_size is None or not 1 <= batch_size <= size:
            raise ValueError(f"batch_size must be between 1 and {size}, got {batch_size}")
        return size // batch_size

    def reshuffled(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Iterate over the mini-batches of reshuffled epochs of tensors, without end.

        Args:
            batch_size: Number of examples in a mini-batch. The last, incomplete one is dropped.
            generator: Source of the orders.

        Yields:
            The mini-batches.
        """
        steps = self.steps_per_epoch(batch_size)
        while self._tensors is not None:
            order = torch.randperm(len(self._tensors[0]), generator=generator)
            yield from map(self._chosen, order[: steps * batch_size].split(batch_size))

    def _chosen(self, index: Tensor) -> Batch:
        assert self._tensors is not None
        inputs, targets = self._tensors
        return inputs[index.to(inputs.device)], targets[index.to(targets.device)]

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
        f"got {type(batch).__name__}"
    )
