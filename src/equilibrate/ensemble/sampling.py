"""Which examples make up each mini-batch of an epoch, from (seed, epoch) alone."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Sampling = Literal["shuffled", "independent"]


def draw(
    seed: int, epoch: int, examples: int, batch_size: int, sampling: Sampling
) -> NDArray[np.int64]:
    """Indices (steps, batch_size) of one epoch, ⌊examples / batch_size⌋ steps.

    Shuffled: a permutation of the examples, cut into batches; what is left over at its end is not
    used in this epoch. Independent: each batch is a random subset by itself, so that a batch alone
    is distributed as a shuffled one.

    >>> draw(0, 0, 6, 2, "shuffled").ravel().tolist()
    [3, 2, 5, 4, 0, 1]
    """
    rng = np.random.default_rng((seed, epoch))
    steps = examples // batch_size
    if sampling == "shuffled" or steps == 1:
        return rng.permutation(examples)[: steps * batch_size].reshape(steps, batch_size)
    return _subsets(rng, examples, steps, batch_size)


def _subsets(rng: np.random.Generator, examples: int, subsets: int, size: int) -> NDArray[np.int64]:
    """Uniform random subsets: draw with replacement, and draw again what an earlier one equals.

    Renaming the examples does not change how this goes, so no subset is preferred to another.
    """
    drawn = rng.integers(examples, size=(subsets, size))
    ranked = np.sort(drawn.astype(np.int32), axis=1)  # several times as fast as in 64 bits
    suspects = np.flatnonzero((ranked[:, 1:] == ranked[:, :-1]).any(1))  # few, in large data
    while len(suspects):
        some = drawn[suspects]
        order = some.argsort(axis=1, kind="stable")
        ranked = np.take_along_axis(some, order, axis=1)
        row, column = np.nonzero(ranked[:, 1:] == ranked[:, :-1])
        some[row, order[row, column + 1]] = rng.integers(examples, size=len(row))
        drawn[suspects] = some
        suspects = suspects[np.unique(row)]
    return drawn
