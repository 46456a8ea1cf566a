"""Sample the mini-batches of an epoch from (seed, epoch) alone."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Sampling = Literal["shuffled", "independent"]
"""How mini-batches are sampled: without replacement over an epoch, or each one independently."""


def draw(
    seed: int, epoch: int, examples: int, batch_size: int, sampling: Sampling
) -> NDArray[np.int64]:
    """Draw the example indices of one epoch, ⌊examples / batch_size⌋ mini-batches.

    "shuffled" cuts a random permutation of the examples into mini-batches; the examples left over
    at its end are not used in this epoch. "independent" draws each mini-batch as a random subset
    of its own, so that a single mini-batch has the same distribution as a shuffled one.

    Args:
        seed: The seed of the replica.
        epoch: The epoch, starting at 0.
        examples: Number of examples in the data set.
        batch_size: Examples in a mini-batch.
        sampling: "shuffled" or "independent".

    Returns:
        Indices (steps, batch_size).

    Example:
        >>> draw(0, 0, 6, 2, "shuffled").ravel().tolist()
        [3, 2, 5, 4, 0, 1]
    """
    rng = np.random.default_rng((seed, epoch))
    steps = examples // batch_size
    if sampling == "shuffled" or steps == 1:
        return rng.permutation(examples)[: steps * batch_size].reshape(steps, batch_size)
    return _subsets(rng, examples, steps, batch_size)


def _subsets(rng: np.random.Generator, examples: int, subsets: int, size: int) -> NDArray[np.int64]:
    """Return uniform random subsets, drawn by replacing duplicates until none are left.

    The procedure is symmetric under a permutation of the examples, so every subset is equally
    likely.
    """
    drawn = rng.integers(examples, size=(subsets, size))
    ranked = np.sort(drawn.astype(np.int32), axis=1)  # several times faster than in 64 bits
    suspects = np.flatnonzero((ranked[:, 1:] == ranked[:, :-1]).any(1))
    while len(suspects):
        some = drawn[suspects]
        order = some.argsort(axis=1, kind="stable")
        ranked = np.take_along_axis(some, order, axis=1)
        row, column = np.nonzero(ranked[:, 1:] == ranked[:, :-1])
        some[row, order[row, column + 1]] = rng.integers(examples, size=len(row))
        drawn[suspects] = some
        suspects = suspects[np.unique(row)]
    return drawn
