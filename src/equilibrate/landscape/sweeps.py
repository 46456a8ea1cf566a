"""Measure G(η), the mean square of the full-batch gradient, at several learning rates."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.landscape.fdr2 import sgd
from equilibrate.landscape.landscape import Landscape
from equilibrate.landscape.mean_loss import Batch, Loss
from equilibrate.observables import Snapshot, fdr1_left, fdr1_right, inner

_MIN_EPOCHS = 8
"""Smallest number of epochs whose quarters are tested for stationarity."""
_MIN_MEASURED = 20
"""Smallest number of measured epochs, each with one full-batch gradient."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The measurement at one learning rate, with one value for each seed."""

    lr: float
    """Learning rate η."""
    fdr2_left: tuple[float, ...]
    """(1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩, the paper's O_FB, which is G(η) without momentum."""
    noise_trace: tuple[float, ...]
    """⟨Tr C̃⟩."""
    residual: float
    """L̄/R̄ − 1 of FDR1 over the measured epochs, for all seeds together."""
    epochs_waited: int
    """Number of epochs before the measurement."""
    epochs_measured: int
    """Number of epochs of the measurement, each with a full-batch gradient at its end."""
    equilibrated: bool
    """Whether FDR1 held in two successive windows before the measurement."""

    @property
    def estimate(self) -> Estimate:
        """The mean of `fdr2_left` over the seeds, with an error bar from their spread."""
        return estimates.mean(torch.tensor([self.fdr2_left]))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Measurements at several learning rates, in increasing order, and their settings."""

    points: tuple[SweepPoint, ...]
    """One point for each learning rate."""
    momentum: float
    """Momentum μ."""
    dampening: float
    """Dampening ν."""
    threshold: float
    """Largest |L̄/R̄ − 1| at which FDR1 counts as satisfied."""


def sweep(
    model: nn.Module | Callable[[int], nn.Module],
    loss: Loss,
    data: Batch,
    *,
    lrs: Sequence[float],
    seeds: Sequence[int] = (0, 1, 2, 3),
    batch_size: int = 100,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    threshold: float = 0.02,
    max_epochs: int = 2000,
    progress: Callable[[float, int, float], object] | None = None,
) -> Sweep:
    """Measure G(η) at several learning rates, training one copy of the model for each seed.

    The learning rates are measured from the largest to the smallest, each starting from the final
    parameters of the one before, with independent mini-batches. At each rate the sweep first waits
    until FDR1 holds: L̄/R̄ − 1 of all seeds together must be within `threshold` over the third and
    over the last quarter of the epochs at this rate. Two windows are tested because a norm that
    changes direction can satisfy FDR1 in one window by accident. Then the measurement takes as many
    epochs again, and at least 20.

    Args:
        model: A model, which is copied for each seed and not changed, or a function that builds a
            model from a seed. Only with the latter do the error bars include the initialization.
        loss: Maps (outputs, targets) to the mean loss over the examples.
        data: (inputs, targets).
        lrs: Learning rates η, at least two.
        seeds: Seeds of the mini-batches, at least two.
        batch_size: Number of examples in a mini-batch.
        momentum: Momentum μ.
        dampening: Dampening ν.
        weight_decay: λ of the L2 term.
        threshold: Largest |L̄/R̄ − 1| at which FDR1 counts as satisfied.
        max_epochs: Maximum number of epochs to wait at each rate.
        progress: Called after each epoch with the learning rate, the number of epochs at this rate,
            and L̄/R̄ − 1 over the second half of them.

    Returns:
        One point for each learning rate.

    Raises:
        ValueError: If an argument is out of range, or SGD diverges. See also `Landscape`.

    Example:
        >>> from torch.nn.functional import cross_entropy
        >>> data = torch.randn(60, 3), torch.arange(60) % 2
        >>> found = sweep(
        ...     nn.Linear(3, 2), cross_entropy, data, lrs=[0.1, 0.2], batch_size=10, threshold=9.0
        ... )
        >>> [(point.lr, len(point.fdr2_left), point.epochs_measured) for point in found.points]
        [(0.1, 4, 20), (0.2, 4, 20)]
    """
    rates = sorted(set(lrs), reverse=True)
    if len(rates) < 2 or not all(0 < lr < math.inf for lr in rates):
        raise ValueError(f"lrs must be at least two learning rates, positive and finite, got {lrs}")
    if len(seeds) < 2:
        raise ValueError(f"seeds must be at least two to compute error bars, got {seeds}")
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, for example 0.02, got {threshold}")
    if max_epochs < _MIN_EPOCHS:
        raise ValueError(f"max_epochs must be at least {_MIN_EPOCHS}, got {max_epochs}")
    replicas = [
        Landscape(
            copy.deepcopy(model) if isinstance(model, nn.Module) else model(seed),
            loss,
            data,
            weight_decay=weight_decay,
            seed=seed,
        )
        for seed in seeds
    ]
    points = []
    for lr in rates:
        run = _epochs(replicas, batch_size, lr, momentum, dampening, progress)
        epochs, equilibrated = [], False
        for epochs in islice(run, max_epochs):
            quarter = len(epochs) // 4
            windows = epochs[-2 * quarter : -quarter], epochs[-quarter:]
            equilibrated = len(epochs) >= _MIN_EPOCHS and all(
                abs(_residual(window)) < threshold for window in windows
            )
            if equilibrated:
                break
        waited, squares = len(epochs), []
        for _ in islice(run, max(_MIN_MEASURED, waited)):
            gradients = (each.gradient() for each in replicas)
            squares.append(torch.stack([inner(g, g) for g in gradients]).cpu())
        _, _, push, noise = torch.stack(epochs[waited:]).mean(0).T
        left = (1 - dampening) * torch.stack(squares).mean(0) - momentum * push
        points.append(
            SweepPoint(
                lr,
                tuple(left.tolist()),
                tuple(noise.tolist()),
                _residual(epochs[waited:]),
                waited,
                len(squares),
                equilibrated,
            )
        )
    return Sweep(tuple(reversed(points)), momentum, dampening, threshold)


def _epochs(
    replicas: Sequence[Landscape],
    batch_size: int,
    lr: float,
    momentum: float,
    dampening: float,
    progress: Callable[[float, int, float], object] | None,
) -> Iterator[list[Tensor]]:
    """Train all replicas without end.

    Yields:
        The means of `_observed` of each replica in all epochs so far: one list that grows.

    Raises:
        ValueError: If SGD diverges.
    """
    steps = replicas[0].data.steps_per_epoch(batch_size)
    runs = []
    for each in replicas:
        batches = each.data.mini_batches(batch_size, sys.maxsize, each.generator)
        runs.append(sgd(each, batches, lr, momentum, dampening))
    epochs: list[Tensor] = []
    while True:
        means = [torch.stack([_observed(s) for s in islice(run, steps)]).mean(0) for run in runs]
        epochs.append(torch.stack(means).cpu())
        if not epochs[-1].isfinite().all():
            raise ValueError(
                f"SGD diverged at η = {lr:g} in epoch {len(epochs)}: remove the largest rates from "
                "lrs"
            )
        if progress is not None:
            progress(lr, len(epochs), _residual(epochs[len(epochs) // 2 :]))
        yield epochs


def _observed(s: Snapshot) -> Tensor:
    """Return both sides of FDR1, v·g with the velocity before the step, and g²."""
    assert s.velocity_before is not None
    push, noise = inner(s.velocity_before, s.gradient), inner(s.gradient, s.gradient)
    return torch.stack([fdr1_left(s), fdr1_right(s), push, noise])


def _residual(epochs: Sequence[Tensor]) -> float:
    """Return L̄/R̄ − 1 of all replicas together."""
    left, right, *_ = torch.stack(list(epochs)).mean((0, 1))
    return (left / right - 1).item()
