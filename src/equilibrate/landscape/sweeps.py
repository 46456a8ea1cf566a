"""G(η): the full-batch gradient square against the learning rate, over an ensemble of seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from equilibrate import estimates
from equilibrate.ensemble import Ensemble, Sampling
from equilibrate.estimates import Estimate
from equilibrate.landscape.examples import Batch
from equilibrate.landscape.surface import Loss
from equilibrate.observables import fdr1_coefficient

SweepProgress = Callable[[float, int, float], object]
"""Told after each epoch: the learning rate, the epochs done at it, and L̄/R̄ − 1 over them."""

_FEWEST = 8
"""Epochs below which no quarter of a run is worth a verdict."""


@dataclass(frozen=True, slots=True)
class RateReading:
    """What an ensemble measured at one learning rate, a number for each seed."""

    lr: float
    second_left: tuple[float, ...]
    """(1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩, the paper's O_FB; G(η) without momentum."""
    noise_trace: tuple[float, ...]
    """⟨Tr C̃⟩."""
    residual: float
    """L̄/R̄ − 1 of FDR1 over the epochs measured, all seeds together."""
    waited: int
    """Epochs before the measurement."""
    measured: int
    """Epochs of the measurement, a full-batch gradient at the end of each."""
    equilibrated: bool
    """Whether FDR1 held before the measurement began, or was not waited for."""

    @property
    def estimate(self) -> Estimate:
        """O_FB with the error from the spread among seeds."""
        return estimates.mean(torch.tensor([self.second_left]))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Readings at several learning rates, from the smallest to the largest, and their settings."""

    rates: tuple[RateReading, ...]
    momentum: float
    dampening: float
    sampling: Sampling
    batches: int
    """M, mini-batches an epoch."""
    tolerance: float


def sweep(
    build: Callable[[int], nn.Module],
    data: Batch,
    *,
    lrs: Sequence[float],
    seeds: Sequence[int] = (0, 1, 2, 3),
    batch_size: int = 100,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    loss: Loss = cross_entropy,
    sampling: Sampling = "independent",
    tolerance: float = 0.02,
    max_epochs: int = 2000,
    measure: int = 20,
    epochs: int | None = None,
    device: torch.device | str = "cpu",
    progress: SweepProgress | None = None,
    finished: Callable[[RateReading], None] = lambda reading: None,
) -> Sweep:
    """Measure G(η) at each of `lrs`, for each of `seeds`, in one `Ensemble`.

    `build(seed)` makes a model and `data` is (inputs, targets). The rates are gone through from the
    largest to the smallest, each from where the one before ended. At each, FDR1 is waited for:
    until L̄/R̄ − 1 of all seeds together is within `tolerance` over the third and over the last
    quarter of the epochs at this rate (two windows, since a norm that turns around fools one), or
    `max_epochs` are over. Then it is measured for as many epochs again, and at least `measure`.
    With `epochs` there is no waiting: that many are run at each rate, as in the paper, and the
    later half of them is measured.

    `progress` is told of every epoch and `finished` of every rate as soon as it is measured.

    `sampling="independent"` gives G without the bias of reshuffled epochs; `"shuffled"` is the
    paper's protocol, for which `fit` corrects as far as it can.

    >>> data = torch.randn(60, 3), torch.arange(60) % 2
    >>> found = sweep(lambda seed: nn.Linear(3, 2), data, lrs=[0.1, 0.2], batch_size=10, epochs=4)
    >>> [(rate.lr, len(rate.second_left), rate.measured) for rate in found.rates]
    [(0.1, 4, 2), (0.2, 4, 2)]
    """
    ordered = sorted(set(lrs), reverse=True)
    if len(ordered) < 2:
        raise ValueError(f"lrs must hold at least two learning rates, got {list(lrs)}")
    if not all(lr > 0 and math.isfinite(lr) for lr in ordered):
        raise ValueError(f"lrs must be positive and finite, got {list(lrs)}")
    if len(seeds) < 2:
        raise ValueError(f"seeds must be at least two for there to be error bars, got {seeds}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, such as 0.02, got {tolerance}")
    least = _FEWEST if epochs is None else 2
    longest = max_epochs if epochs is None else epochs
    if longest < least:
        name = "max_epochs" if epochs is None else "epochs"
        raise ValueError(f"{name} must be at least {least}, got {longest}")
    ensemble = Ensemble(
        [build(seed) for seed in seeds],
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
    readings: list[RateReading] = []
    for lr in ordered:
        ensemble.lr = lr
        run = _AtOneRate(ensemble, progress)
        if epochs is None:
            held = run.wait(tolerance, max_epochs)
            readings.append(run.measure(max(measure, len(run.left)), held))
        else:
            run.go(epochs // 2)
            readings.append(run.measure(epochs - epochs // 2, equilibrated=True))
        finished(readings[-1])
    batches = ensemble.steps_per_epoch
    return Sweep(tuple(reversed(readings)), momentum, dampening, sampling, batches, tolerance)


class _AtOneRate:
    """The epochs of an ensemble at one learning rate: means over each, for each replica."""

    def __init__(self, ensemble: Ensemble, progress: SweepProgress | None) -> None:
        self._ensemble = ensemble
        self._progress = progress
        self.left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._velocity_gradient: list[Tensor] = []

    def wait(self, tolerance: float, longest: int) -> bool:
        """Run until FDR1 holds over two quarters in a row; whether it did in time."""
        while len(self.left) < longest:
            self.go(1)
            quarter = len(self.left) // 4
            windows = slice(-2 * quarter, -quarter), slice(-quarter, None)
            if len(self.left) >= _FEWEST and all(
                abs(self._residual(window)) < tolerance for window in windows
            ):
                return True
        return False

    def go(self, epochs: int) -> None:
        """Run some epochs."""
        for _ in range(epochs):
            epoch = self._ensemble.run_epoch()
            self.left.append(epoch.left.mean(0))
            self._right.append(epoch.right.mean(0))
            self._velocity_gradient.append(epoch.velocity_gradient.mean(0))
            if self._progress is not None:
                done = len(self.left)
                self._progress(epoch.lr[0], done, self._residual(slice(done // 2, None)))

    def measure(self, epochs: int, equilibrated: bool) -> RateReading:
        """Run some epochs with a full-batch gradient at the end of each, and read them."""
        waited = len(self.left)
        squares: list[Tensor] = []
        for _ in range(epochs):
            self.go(1)
            square = self._ensemble.full_gradient_square()
            squares.append(torch.tensor(square, dtype=torch.float64))
        e, window = self._ensemble, slice(waited, None)
        lr, keep = e.lr[0], 1 - e.dampening
        full = torch.stack(squares).mean(0)
        push = torch.stack(self._velocity_gradient[window]).mean(0)
        speed = torch.stack(self._right[window]).mean(0) / fdr1_coefficient(
            lr, e.momentum, e.dampening
        )
        # Appendix A (redundant1), traced and solved for C̃.
        noise = ((1 - e.momentum**2) * speed + 2 * e.momentum * keep * push) / keep**2
        return RateReading(
            lr,
            tuple((keep * full - e.momentum * push).tolist()),
            tuple(noise.tolist()),
            self._residual(window),
            waited,
            epochs,
            equilibrated,
        )

    def _residual(self, window: slice) -> float:
        """L̄/R̄ − 1 of all replicas together."""
        left, right = (torch.stack(side[window]).mean() for side in (self.left, self._right))
        return (left / right - 1).item()
