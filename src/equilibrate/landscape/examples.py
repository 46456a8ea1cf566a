"""The training set as a landscape reads it: in chunks, once through, and in mini-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
Data = Batch | Iterable[Batch]


class Examples:
    """(inputs, targets) tensors, or an iterable of such batches that can be gone through again.

    A `DataLoader` serves; its draws from the global random state are undone.

    >>> examples = Examples((torch.arange(5.0)[:, None], torch.zeros(5)))
    >>> [len(inputs) for inputs, _ in examples.chunks(2)]
    [2, 2, 1]
    """

    def __init__(self, data: Data) -> None:
        self._tensors: Batch | None = None
        self._batches: Iterable[Batch] = ()
        if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
            inputs, targets = cast(Batch, data)
            if len(inputs) != len(targets) or len(inputs) == 0:
                raise ValueError(
                    f"data has {len(inputs)} inputs and {len(targets)} targets: give as many of "
                    "one as of the other, and at least one"
                )
            self._tensors = inputs, targets
        elif isinstance(data, Iterator):
            raise TypeError(
                f"data is a {type(data).__name__}, which can be gone through once only: give a "
                "list or a DataLoader"
            )
        else:
            self._batches = cast(Iterable[Batch], data)

    def chunks(self, size: int) -> Iterator[Batch]:
        """Every example once, at most `size` at a time."""
        for inputs, targets in self._whole():
            yield from zip(inputs.split(size), targets.split(size), strict=True)

    def mini_batches(
        self, batch: int | None, draws: int, generator: torch.Generator
    ) -> Iterator[Batch]:
        """`draws` mini-batches: independent ones of `batch` examples, none of them twice in one.

        An iterable's own batches are taken in their own order, and begun again after the last; a
        loader that shuffles does so afresh each time.
        """
        if self._tensors is None:
            if batch is not None:
                raise ValueError(
                    f"batch = {batch}, but data comes in batches of its own: leave batch out, or "
                    "give (inputs, targets) tensors"
                )
            yield from self._cycled(draws, generator)
            return
        inputs, targets = self._tensors
        if batch is None or not 1 <= batch <= len(inputs):
            raise ValueError(f"batch must be between 1 and {len(inputs)}, got {batch}")
        for _ in range(draws):
            chosen = torch.randperm(len(inputs), generator=generator)[:batch].to(inputs.device)
            yield inputs[chosen], targets[chosen.to(targets.device)]

    def epochs(self, batch: int, generator: torch.Generator) -> Iterator[Iterator[Batch]]:
        """Reshuffled epochs without end, each of ⌊N_s/batch⌋ mini-batches."""
        if self._tensors is None:
            raise TypeError("reshuffled epochs need data as (inputs, targets) tensors")
        inputs, targets = self._tensors
        while True:
            order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
            whole = order[: len(order) // batch * batch].split(batch)
            yield ((inputs[chosen], targets[chosen.to(targets.device)]) for chosen in whole)

    def _whole(self, seed: int | None = None) -> Iterator[Batch]:
        if self._tensors is not None:
            yield self._tensors
            return
        seen = False
        with torch.random.fork_rng(devices=[]):  # a DataLoader draws from the global state
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            for inputs, targets in self._batches:
                seen = True
                yield inputs, targets
        if not seen:
            raise ValueError("data yields no batch: give a list or a DataLoader that is not empty")

    def _cycled(self, draws: int, generator: torch.Generator) -> Iterator[Batch]:
        drawn = 0
        while drawn < draws:
            seed = int(torch.randint(1 << 62, (), generator=generator))
            for pair in self._whole(seed):
                if drawn == draws:
                    return
                yield pair
                drawn += 1
