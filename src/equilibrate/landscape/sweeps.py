"""Measure G(η), the mean square of the full-batch gradient, at several learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibrate import estimates
from equilibrate.ensemble import Ensemble, Sampling
from equilibrate.estimates import Estimate
from equilibrate.landscape.data import Batch
from equilibrate.landscape.landscape import Loss
from equilibrate.observables import fdr1_coefficient

SweepProgress = Callable[[float, int, float], object]
"""Called after each epoch with the learning rate, the number of epochs at this rate, and L̄/R̄ − 1
over the second half of them."""

_MIN_EPOCHS = 8
"""Smallest number of epochs whose quarters are tested for stationarity."""


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
    """Whether FDR1 held before the measurement; True if the number of epochs was fixed."""

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
    sampling: Sampling
    """How mini-batches were drawn."""
    steps_per_epoch: int
    """M, the number of mini-batches in an epoch."""
    threshold: float
    """Largest |L̄/R̄ − 1| at which FDR1 counts as satisfied."""


def sweep(
    build_model: Callable[[int], nn.Module],
    loss: Loss,
    data: Batch,
    *,
    lrs: Sequence[float],
    seeds: Sequence[int] = (0, 1, 2, 3),
    batch_size: int = 100,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    sampling: Sampling = "independent",
    threshold: float = 0.02,
    max_epochs: int = 2000,
    min_measured_epochs: int = 20,
    epochs: int | None = None,
    device: torch.device | str = "cpu",
    progress: SweepProgress | None = None,
    on_point: Callable[[SweepPoint], object] | None = None,
) -> Sweep:
    """Measure G(η) at several learning rates for several seeds, in one `Ensemble`.

    The learning rates are measured from the largest to the smallest, each starting from the final
    state of the one before. At each rate the sweep first waits until FDR1 holds: L̄/R̄ − 1 of all
    seeds together must be within `threshold` over the third and over the last quarter of the epochs
    at this rate. Two windows are tested because a norm that changes direction can satisfy FDR1 in
    one window by accident. Then the measurement takes as many epochs again.

    Args:
        build_model: Builds the model for a seed.
        loss: Maps (outputs, targets) to the mean loss over the examples.
        data: (inputs, targets).
        lrs: Learning rates η, at least two.
        seeds: Seeds of the replicas, at least two.
        batch_size: Number of examples in a mini-batch.
        momentum: Momentum μ.
        dampening: Dampening ν.
        weight_decay: λ of the L2 term.
        sampling: `"independent"` batches give G without the bias of reshuffled epochs.
            `"shuffled"` is the paper's protocol; `fit` then corrects the bias approximately.
        threshold: Largest |L̄/R̄ − 1| at which FDR1 counts as satisfied.
        max_epochs: Maximum number of epochs to wait at each rate.
        min_measured_epochs: Minimum number of measured epochs at each rate.
        epochs: If given, run this number of epochs at each rate without waiting, as in the paper,
            and measure over the second half of them.
        device: Device of the ensemble.
        progress: Called after each epoch with the learning rate, the number of epochs at this rate,
            and L̄/R̄ − 1.
        on_point: Called with each point as soon as it is measured.

    Returns:
        One point for each learning rate.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> from torch.nn.functional import cross_entropy
        >>> def build_model(seed):
        ...     return nn.Linear(3, 2)
        >>> data = torch.randn(60, 3), torch.arange(60) % 2
        >>> found = sweep(build_model, cross_entropy, data, lrs=[0.1, 0.2], batch_size=10, epochs=4)
        >>> [(point.lr, len(point.fdr2_left), point.epochs_measured) for point in found.points]
        [(0.1, 4, 2), (0.2, 4, 2)]
    """
    ordered = sorted(set(lrs), reverse=True)
    if len(ordered) < 2:
        raise ValueError(f"lrs must contain at least two learning rates, got {list(lrs)}")
    if not all(lr > 0 and math.isfinite(lr) for lr in ordered):
        raise ValueError(f"lrs must be positive and finite, got {list(lrs)}")
    if len(seeds) < 2:
        raise ValueError(f"seeds must be at least two to compute error bars, got {seeds}")
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, for example 0.02, got {threshold}")
    if epochs is None and max_epochs < _MIN_EPOCHS:
        raise ValueError(f"max_epochs must be at least {_MIN_EPOCHS}, got {max_epochs}")
    if epochs is not None and epochs < 2:
        raise ValueError(f"epochs must be at least 2, got {epochs}")
    ensemble = Ensemble(
        [build_model(seed) for seed in seeds],
        loss,
        data,
        seeds=seeds,
        lr=ordered[0],
        batch_size=batch_size,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        sampling=sampling,
        device=device,
    )
    points: list[SweepPoint] = []
    for lr in ordered:
        ensemble.lr = lr
        run = _ConstantRateRun(ensemble, progress)
        if epochs is None:
            equilibrated = run.wait(threshold, max_epochs)
            measured = max(min_measured_epochs, run.epochs)
        else:
            run.train(epochs // 2)
            equilibrated, measured = True, epochs - epochs // 2
        points.append(run.measure(measured, equilibrated))
        if on_point is not None:
            on_point(points[-1])
    return Sweep(
        tuple(reversed(points)),
        momentum,
        dampening,
        sampling,
        ensemble.steps_per_epoch,
        threshold,
    )


class _ConstantRateRun:
    """The epochs of an ensemble at one learning rate, with the means over each of them."""

    def __init__(self, ensemble: Ensemble, progress: SweepProgress | None) -> None:
        self._ensemble = ensemble
        self._progress = progress
        # One tensor for each epoch, one value for each replica.
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._velocity_gradient: list[Tensor] = []

    @property
    def epochs(self) -> int:
        """Number of epochs so far."""
        return len(self._left)

    def wait(self, threshold: float, max_epochs: int) -> bool:
        """Return whether FDR1 held over two successive quarters of the run, after waiting."""
        while self.epochs < max_epochs:
            self.train(1)
            quarter = self.epochs // 4
            windows = slice(-2 * quarter, -quarter), slice(-quarter, None)
            if self.epochs >= _MIN_EPOCHS and all(
                abs(self._residual(window)) < threshold for window in windows
            ):
                return True
        return False

    def train(self, epochs: int) -> None:
        """Run some epochs."""
        for _ in range(epochs):
            epoch = self._ensemble.run_epoch()
            self._left.append(epoch.left.mean(0))
            self._right.append(epoch.right.mean(0))
            self._velocity_gradient.append(epoch.velocity_gradient.mean(0))
            if self._progress is not None:
                second_half = slice(self.epochs // 2, None)
                self._progress(epoch.lr[0], self.epochs, self._residual(second_half))

    def measure(self, epochs: int, equilibrated: bool) -> SweepPoint:
        """Return the measurement over further epochs, with a full-batch gradient after each."""
        waited = self.epochs
        squares: list[Tensor] = []
        for _ in range(epochs):
            self.train(1)
            square = self._ensemble.full_gradient_square()
            squares.append(torch.tensor(square, dtype=torch.float64))
        e, window = self._ensemble, slice(waited, None)
        lr, keep = e.lr[0], 1 - e.dampening
        full = torch.stack(squares).mean(0)
        push = torch.stack(self._velocity_gradient[window]).mean(0)
        speed = torch.stack(self._right[window]).mean(0) / fdr1_coefficient(
            lr, e.momentum, e.dampening
        )
        # The trace of (redundant1) in appendix A, solved for C̃.
        noise = ((1 - e.momentum**2) * speed + 2 * e.momentum * keep * push) / keep**2
        return SweepPoint(
            lr,
            tuple((keep * full - e.momentum * push).tolist()),
            tuple(noise.tolist()),
            self._residual(window),
            waited,
            epochs,
            equilibrated,
        )

    def _residual(self, window: slice) -> float:
        """Return L̄/R̄ − 1 of all replicas together."""
        left, right = (torch.stack(side[window]).mean() for side in (self._left, self._right))
        return (left / right - 1).item()
