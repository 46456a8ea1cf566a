"""Measure G(η), the mean square of the full-batch gradient, at several learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from equilibrate.landscape.data import Batch
from equilibrate.landscape.landscape import Loss
from equilibrate.landscape.points import Sweep, SweepPoint, point_from_dict
from equilibrate.observables import fdr1_coefficient
from equilibrate_paper.ensemble import Ensemble, Sampling

SweepProgress = Callable[[float, int, float], object]
"""Called after each epoch with the learning rate, the number of epochs at this rate, and L̄/R̄ − 1
over the second half of them."""

_MIN_EPOCHS = 8
"""Smallest number of epochs whose quarters are tested for stationarity."""
_SERIES = ("left", "right", "velocity_gradient")
"""The observables of an epoch that are averaged."""


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

    Use `SweepRun` for a sweep that can be interrupted and resumed.

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
            and measure over the second half of them. FDR1 is then tested in both halves of the
            measurement.
        device: Device of the ensemble.
        progress: Called after each epoch with the learning rate, the number of epochs at this rate,
            and L̄/R̄ − 1.
        on_point: Called with each point as soon as it is measured.

    Returns:
        One point for each learning rate. Invalid arguments and a run that diverges raise the errors
        of `SweepRun`.

    Example:
        >>> from torch.nn.functional import cross_entropy
        >>> def build_model(seed):
        ...     return nn.Linear(3, 2)
        >>> data = torch.randn(60, 3), torch.arange(60) % 2
        >>> found = sweep(build_model, cross_entropy, data, lrs=[0.1, 0.2], batch_size=10, epochs=4)
        >>> [(point.lr, len(point.fdr2_left), point.epochs_measured) for point in found.points]
        [(0.1, 4, 2), (0.2, 4, 2)]
    """
    run = SweepRun(
        build_model,
        loss,
        data,
        lrs=lrs,
        seeds=seeds,
        batch_size=batch_size,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        sampling=sampling,
        threshold=threshold,
        max_epochs=max_epochs,
        min_measured_epochs=min_measured_epochs,
        epochs=epochs,
        device=device,
    )
    while not run.finished:
        point = run.run_epoch(progress)
        if point is not None and on_point is not None:
            on_point(point)
    return run.result()


class SweepRun:
    """A sweep that runs epoch by epoch and can be saved and resumed at any epoch.

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
        sampling: As in `sweep`.
        threshold: As in `sweep`.
        max_epochs: As in `sweep`.
        min_measured_epochs: As in `sweep`.
        epochs: As in `sweep`.
        device: Device of the ensemble.

    Raises:
        TypeError: If an argument has the wrong type, such as a model in place of a function that
            builds it. See also `Ensemble`.
        ValueError: If an argument is out of range.

    Example:
        >>> from torch.nn.functional import cross_entropy
        >>> data = torch.randn(60, 3), torch.arange(60) % 2
        >>> def new():
        ...     return SweepRun(
        ...         lambda seed: nn.Linear(3, 2),
        ...         cross_entropy,
        ...         data,
        ...         lrs=[0.1, 0.2],
        ...         batch_size=10,
        ...         epochs=4,
        ...     )
        >>> run, resumed = new(), new()
        >>> _ = run.run_epoch()
        >>> resumed.load_state_dict(run.state_dict())
        >>> while not resumed.finished:
        ...     _ = resumed.run_epoch()
        >>> [point.lr for point in resumed.result().points]
        [0.1, 0.2]
    """

    def __init__(
        self,
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
    ) -> None:
        lrs, seeds = _listed("lrs", lrs), _listed("seeds", seeds)
        self._lrs = sorted(set(lrs), reverse=True)
        if len(self._lrs) < 2:
            raise ValueError(f"lrs must contain at least two learning rates, got {lrs}")
        if not all(lr > 0 and math.isfinite(lr) for lr in self._lrs):
            raise ValueError(f"lrs must be positive and finite, got {lrs}")
        if len(seeds) < 2:
            raise ValueError(f"seeds must be at least two to compute error bars, got {seeds}")
        if not threshold > 0:
            raise ValueError(f"threshold must be positive, for example 0.02, got {threshold}")
        if epochs is None and max_epochs < _MIN_EPOCHS:
            raise ValueError(f"max_epochs must be at least {_MIN_EPOCHS}, got {max_epochs}")
        if epochs is not None and epochs < 2:
            raise ValueError(f"epochs must be at least 2, got {epochs}")
        self._ensemble = Ensemble(
            [_built(build_model, seed) for seed in seeds],
            loss,
            data,
            seeds=seeds,
            lr=self._lrs[0],
            batch_size=batch_size,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            sampling=sampling,
            device=device,
        )
        self.threshold = threshold
        self._max_epochs, self._epochs = max_epochs, epochs
        self._min_measured = min_measured_epochs
        self._points: list[SweepPoint] = []
        self._start_rate()

    @property
    def points(self) -> tuple[SweepPoint, ...]:
        """The points measured so far, from the largest learning rate to the smallest."""
        return tuple(self._points)

    @property
    def finished(self) -> bool:
        """Whether all learning rates are measured."""
        return len(self._points) == len(self._lrs)

    @property
    def epoch(self) -> int:
        """Number of epochs at the current learning rate."""
        return len(self._series["left"])

    def run_epoch(self, progress: SweepProgress | None = None) -> SweepPoint | None:
        """Run one epoch at the current learning rate.

        Args:
            progress: Called after the epoch, as in `sweep`.

        Returns:
            The measurement at this rate if it is now complete, else None.

        Raises:
            ValueError: If the sweep is finished, or if SGD has diverged.
        """
        if self.finished:
            raise ValueError("the sweep is finished: create another one with other rates")
        lr, epoch = self._lrs[len(self._points)], self._ensemble.run_epoch()
        for name in _SERIES:
            self._series[name].append(getattr(epoch, name).mean(0))
        self._require_finite(lr)
        if progress is not None:
            progress(lr, self.epoch, self._residual(slice(self.epoch // 2, None)))
        if self._waited is None:
            self._stop_waiting()
            return None
        square = self._ensemble.full_gradient_square()
        self._squares.append(torch.tensor(square, dtype=torch.float64))
        measured = len(self._squares)
        if measured < self._to_measure():
            return None
        if self._epochs is not None:
            self._equilibrated = self._holds(measured // 2)
        self._points.append(self._point())
        self._start_rate()
        return self._points[-1]

    def result(self) -> Sweep:
        """Return the points measured so far, in increasing order, and their settings."""
        e = self._ensemble
        points = tuple(reversed(self._points))
        return Sweep(points, e.momentum, e.dampening, e.sampling, e.steps_per_epoch, self.threshold)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs: numbers, strings, lists and tensors."""
        return {
            "lrs": list(self._lrs),
            "points": [asdict(point) for point in self._points],
            "waited": self._waited,
            "equilibrated": self._equilibrated,
            "series": {name: list(values) for name, values in self._series.items()},
            "squares": list(self._squares),
            "ensemble": self._ensemble.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; the run continues bit for bit.

        Args:
            state_dict: The state of a run with the same settings.

        Raises:
            ValueError: If the settings differ.
        """
        if state_dict["lrs"] != self._lrs:
            raise ValueError(
                f"the state belongs to a sweep over lrs={state_dict['lrs']}, but this one has "
                f"lrs={self._lrs}: create it with the same rates"
            )
        self._ensemble.load_state_dict(state_dict["ensemble"])
        self._points = [point_from_dict(point) for point in state_dict["points"]]
        self._waited = state_dict["waited"]
        self._equilibrated = state_dict["equilibrated"]
        self._series = {name: list(values) for name, values in state_dict["series"].items()}
        self._squares = list(state_dict["squares"])

    def _start_rate(self) -> None:
        if not self.finished:
            self._ensemble.lr = self._lrs[len(self._points)]
        self._waited: int | None = None  # epochs before the measurement; None while waiting
        self._equilibrated = False
        # One tensor for each epoch, with one value for each replica.
        self._series: dict[str, list[Tensor]] = {name: [] for name in _SERIES}
        self._squares: list[Tensor] = []

    def _stop_waiting(self) -> None:
        if self._epochs is not None:
            done = self.epoch == self._epochs // 2
        else:
            self._equilibrated = self.epoch >= _MIN_EPOCHS and self._holds(self.epoch // 4)
            done = self._equilibrated or self.epoch == self._max_epochs
        if done:
            self._waited = self.epoch

    def _to_measure(self) -> int:
        assert self._waited is not None
        if self._epochs is not None:
            return self._epochs - self._waited
        return max(self._min_measured, self._waited)

    def _point(self) -> SweepPoint:
        assert self._waited is not None
        e, window = self._ensemble, slice(self._waited, None)
        lr, keep = e.lr[0], 1 - e.dampening
        full = torch.stack(self._squares).mean(0)
        push = torch.stack(self._series["velocity_gradient"][window]).mean(0)
        speed = torch.stack(self._series["right"][window]).mean(0) / fdr1_coefficient(
            lr, e.momentum, e.dampening
        )
        # The trace of (redundant1) in appendix A, solved for C̃.
        noise = ((1 - e.momentum**2) * speed + 2 * e.momentum * keep * push) / keep**2
        return SweepPoint(
            lr,
            tuple((keep * full - e.momentum * push).tolist()),
            tuple(noise.tolist()),
            self._residual(window),
            self._waited,
            len(self._squares),
            self._equilibrated,
        )

    def _holds(self, length: int) -> bool:
        """Return whether FDR1 held over each of the last two windows of a length."""
        windows = slice(-2 * length, -length), slice(-length, None)
        return length > 0 and all(abs(self._residual(w)) < self.threshold for w in windows)

    def _residual(self, window: slice) -> float:
        """Return L̄/R̄ − 1 of all replicas together."""
        left, right = (torch.stack(self._series[side][window]).mean() for side in _SERIES[:2])
        return (left / right - 1).item()

    def _require_finite(self, lr: float) -> None:
        last = torch.stack([values[-1] for values in self._series.values()])
        finite = last.isfinite().all(0).tolist()
        diverged = [s for s, fine in zip(self._ensemble.seeds, finite, strict=True) if not fine]
        if diverged:
            raise ValueError(
                f"SGD diverged at η = {lr:g} in epoch {self.epoch} for the seeds "
                f"{', '.join(map(str, diverged))}: remove the largest rates from lrs"
            )


def _listed(name: str, values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(
            f"{name} must be a list of numbers, such as [1, 2], got {type(values).__name__}"
        )
    return list(values)


def _built(build_model: Callable[[int], nn.Module], seed: int) -> nn.Module:
    if isinstance(build_model, nn.Module) or not callable(build_model):
        raise TypeError(
            "build_model must be a function from a seed to a model, such as lambda seed: "
            f"nn.Linear(3, 2), got {type(build_model).__name__}"
        )
    model = build_model(seed)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"build_model({seed}) must return a torch.nn.Module, got {type(model).__name__}"
        )
    return model
