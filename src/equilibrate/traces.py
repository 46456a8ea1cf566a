"""Where the parameters have been since the last reset, in a few hundred numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Sketches of the parameters at equally spaced steps since the last reset.

    A sketch is a random projection of θ onto a few numbers. It is linear in θ and keeps squared
    distances on average, so that |θ − c|² is known for every centre c that is a combination of
    recorded positions: the position at some step, or the mean over some of them.
    """

    steps: NDArray[np.int64]
    """Steps since the last reset, (n,), beginning with 0."""
    positions: Floats
    """Sketch of the parameters after these steps, (n, m)."""
    travelled: Floats
    """Σ (1+μ)/(1−μ) |Δ|² over all steps Δ before each record, (n,).

    It is the mean-square displacement that the same steps would make if nothing held the
    parameters. For optimizers of the Adam family β₁ takes the place of μ.
    """

    def __len__(self) -> int:
        return len(self.steps)
