"""Samples of (θ − m)·g, and the means m of the parameters, of one bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate.watching.means import Means, choose
from equilibrate.watching.parameters import Bucket


class Tracker:
    """Samples of (θ − m)·g for the parameters of one bucket.

    Args:
        bucket: The parameters.
        optimizer: The optimizer that moves them.
        count: Number of means m.
        rows: Number of samples to keep.
        share: The share of this bucket in what tells that a step was made.
    """

    def __init__(
        self, bucket: Bucket, optimizer: Optimizer, count: int, rows: int, share: float
    ) -> None:
        self.bucket = bucket
        self._optimizer = optimizer
        self._count = count
        # The last column tells whether the step was made, or skipped by gradient scaling.
        self.samples = torch.zeros(rows, count + 1, dtype=torch.float64, device=bucket.device)
        self._made = share / bucket.layout.processes
        self._saved: list[Tensor] | None = None
        self._kept: Means | None = None

    @property
    def means(self) -> Means:
        """The means of this process's parts of the parameters."""
        if self._kept is None:
            self._kept = choose(self.bucket.local(), self._count, self.bucket.shares())
        return self._kept

    def free(self) -> None:
        """Release the means."""
        self._kept = None

    def save(self) -> None:
        """Copy the parameters before a step whose gradient is not known yet."""
        self._saved = [p.detach().clone() for p in self.bucket.local()]

    def measure(self, row: int, shares: Sequence[float]) -> None:
        """Write a sample and move the means.

        The parameters are those of the last `save`, if there was one since the last measurement.

        Args:
            row: Where to write the sample.
            shares: By which share of θ − m each mean moves.
        """
        params, self._saved = self._saved or self.bucket.local(), None
        sample = self.samples[row]
        values, made = sample[:-1], sample[-1]
        gradients = self.bucket.local_like([p.grad for p in self.bucket.params])
        self.means.measure(params, gradients, values, shares)
        if self._optimizer.param_groups[self.bucket.group].get("maximize", False):
            values.neg_()
        made.fill_(self._made)
        if (scale := getattr(self._optimizer, "grad_scale", None)) is not None:
            values.div_(_on(scale, values))
        if (found := getattr(self._optimizer, "found_inf", None)) is not None:
            sample.masked_fill_(_on(found, sample) > 0, 0.0)


def _on(number: Tensor, like: Tensor) -> Tensor:
    return number.detach().reshape(()).to(like.device, non_blocking=True)
