"""What reshuffling the data each epoch, instead of drawing independent batches, does to SGD."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from equilibrate.solvable.base import State, Step
from equilibrate.solvable.matrices import gaussian, root
from equilibrate.solvable.quadratic import Quadratic


def epoch_end_factor(rate: Tensor | float, batches: int) -> Tensor:
    """Variance along a mode at the end of a reshuffled epoch, over that of independent batches.

    With r = 1 − ηh, ηh = `rate` in [0, 2), no momentum and M = `batches` an epoch it is

        M/(M−1) · [1 − ((1+r)/(1−r)) (1−r^M)/(M(1+r^M))]

    or 1 − tanh(x/2)/(x/2) for many batches and x = Mηh. The M noise vectors sum to zero and carry
    the weights 1, r, …, r^(M−1), so it is these weights' variance over their mean square; evaluated
    thus, nothing cancels as ηh → 0, where it vanishes as M(M+1)(ηh)²/12.

    >>> print(f"{epoch_end_factor(0.01, batches=100).item():.4f}")
    0.0772
    """
    rate = torch.as_tensor(rate, dtype=torch.float64)
    if not ((rate >= 0) & (rate < 2)).all():
        raise ValueError(f"rate = lr * curvature must lie in [0, 2), got {rate.tolist()}")
    if batches < 2:
        raise ValueError(f"batches must be at least 2 to be shuffled, got {batches}")
    rate = rate[..., None]
    weights = (1 - rate) ** torch.arange(batches, device=rate.device)
    one_minus_weights = rate * (weights.cumsum(-1) - weights)  # 1 − r^k = (1−r)(1 + … + r^(k−1))
    return one_minus_weights.var(-1) / weights.square().mean(-1)


def simulate_reshuffled(
    model: Quadratic, state: State, batches: int, epochs: int, generator: torch.Generator
) -> Iterator[Step]:
    """Run SGD on `batches` fixed noise vectors, each used once an epoch, in a fresh random order.

    The vectors sum to zero and have the model's noise covariance exactly, so that only the lack of
    independence within an epoch sets this apart from `model.simulate`. The vectors are the same for
    all replicas; each replica has an order of its own.
    """
    vectors = _noise_vectors(model.noise, batches, generator)
    shape = (len(state.position), batches)
    for _ in range(epochs):
        order = torch.rand(shape, device=vectors.device, generator=generator).argsort(dim=1)
        for chosen in order.T:
            step = model.step(state, model.full_gradient(state.position) + vectors[chosen])
            yield step
            state = step.next_state


def _noise_vectors(noise: Tensor, batches: int, generator: torch.Generator) -> Tensor:
    dimension = len(noise)
    if batches <= dimension:
        raise ValueError(
            f"batches must exceed the dimension {dimension}, for that many vectors with zero sum "
            f"to have the noise's covariance; got {batches}"
        )
    draw = gaussian((batches,), torch.eye(dimension).to(noise), generator)
    uncorrelated = torch.linalg.qr(draw - draw.mean(0)).Q
    return math.sqrt(batches) * uncorrelated @ root(noise).T
