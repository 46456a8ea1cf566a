"""SGD on reshuffled epochs, compared to SGD on independent mini-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from equilibrate.observables import Snapshot
from equilibrate.solvable.matrices import gaussian, root
from equilibrate.solvable.quadratic import Quadratic


def epoch_end_factor(rate: Tensor | float, batches: int) -> Tensor:
    """Return the factor by which reshuffling reduces the variance of a mode at the ends of epochs.

    It is relative to independent batches. Without momentum, with r = 1 − ηh and M batches per
    epoch, the factor is

        M/(M−1) · [1 − ((1+r)/(1−r)) (1−r^M)/(M(1+r^M))]

    which is 1 − tanh(x/2)/(x/2) for many batches, with x = Mηh. The M noise vectors sum to zero and
    have the weights 1, r, …, r^(M−1), so the factor is the variance of the weights divided by their
    mean square. It is computed in this form, which is free of cancellation as ηh → 0, where the
    factor vanishes as M(M+1)(ηh)²/12.

    Args:
        rate: ηh, learning rate times curvature, in [0, 2).
        batches: M, the number of batches per epoch.

    Returns:
        The factor, of the shape of `rate`.

    Raises:
        ValueError: If `rate` or `batches` is out of range.

    Example:
        >>> print(f"{epoch_end_factor(0.01, batches=100).item():.4f}")
        0.0772
    """
    rate = torch.as_tensor(rate, dtype=torch.float64)
    if not ((rate >= 0) & (rate < 2)).all():
        raise ValueError(f"rate = lr * curvature must lie in [0, 2), got {rate.tolist()}")
    if batches < 2:
        raise ValueError(f"batches must be at least 2, got {batches}")
    rate = rate[..., None]
    weights = (1 - rate) ** torch.arange(batches, device=rate.device)
    one_minus_weights = rate * (weights.cumsum(-1) - weights)  # 1 − r^k = (1−r)(1 + … + r^(k−1))
    return one_minus_weights.var(-1) / weights.square().mean(-1)


def simulate_reshuffled(
    model: Quadratic,
    start: tuple[Tensor, Tensor],
    batches: int,
    epochs: int,
    generator: torch.Generator,
) -> Iterator[Snapshot]:
    """Run SGD on a fixed set of noise vectors, each used once per epoch in a new random order.

    The vectors sum to zero and have exactly the noise covariance of the model. The only difference
    to `SolvableSGD.simulate` is that batches of the same epoch are not independent. All replicas
    share the vectors, and each replica has its own order.

    Args:
        model: The quadratic loss and the settings of SGD.
        start: Parameters θ and velocities v at the start, each of shape (R, d) for R replicas.
        batches: Number of noise vectors, and of steps per epoch. More than the dimension d.
        epochs: Number of epochs.
        generator: Source of the vectors and of the orders.

    Yields:
        Each step, of all replicas.
    """
    vectors = _noise_vectors(model.noise, batches, generator)
    parameters, velocity = start
    shape = (len(parameters), batches)
    for _ in range(epochs):
        order = torch.rand(shape, device=vectors.device, generator=generator).argsort(dim=1)
        for chosen in order.T:
            gradient = model.full_gradient(parameters) + vectors[chosen]
            snapshot = model.step(parameters, velocity, gradient)
            yield snapshot
            parameters, velocity = snapshot.parameters_after, snapshot.velocity_after


def _noise_vectors(noise: Tensor, batches: int, generator: torch.Generator) -> Tensor:
    dimension = len(noise)
    if batches <= dimension:
        raise ValueError(
            f"batches must exceed the dimension {dimension}, so that vectors with zero sum can "
            f"have the covariance of the noise, got {batches}"
        )
    draw = gaussian((batches,), torch.eye(dimension).to(noise), generator)
    uncorrelated = torch.linalg.qr(draw - draw.mean(0)).Q
    return math.sqrt(batches) * uncorrelated @ root(noise).T
