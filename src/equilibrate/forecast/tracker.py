"""Samples of (θ − m)·g with a mean m of the parameters, and when they were taken."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate.forecast.outcome import Samples
from equilibrate.watching.means import Means, choose
from equilibrate.watching.parameters import Bucket


class SampleLog:
    """At which steps the last samples were taken, and how old the mean of the parameters was.

    Args:
        rows: Number of samples to keep.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self.taken = 0
        """Number of samples so far."""
        self._steps, self._ages = array("q", [0] * self._rows), array("d", [0.0] * self._rows)

    @property
    def last(self) -> int:
        """The row of the last sample."""
        return (self.taken - 1) % self._rows

    def add(self, step: int, age: float) -> int:
        """Note a sample.

        Returns:
            The row to write it into.
        """
        self.taken += 1
        self._steps[self.last], self._ages[self.last] = step, age
        return self.last

    def samples(self, values: np.ndarray, since: int) -> Samples:
        """Return the samples that were taken after a step, given the values of all rows."""
        steps, ages = np.array(self._steps), np.array(self._ages)
        chosen = (np.arange(self._rows) < self.taken) & (steps >= since) & np.isfinite(ages)
        return Samples(steps[chosen].astype(float), values[chosen], ages[chosen])

    def state_dict(self, values: Tensor) -> dict[str, Any]:
        """Return the state, with the values of all rows."""
        kept = min(self.taken, self._rows)
        return {
            "taken": self.taken,
            "steps": self._steps[:kept].tolist(),
            "ages": self._ages[:kept].tolist(),
            "values": values[:kept].tolist(),
        }

    def load_state_dict(self, state: dict[str, Any], width: int) -> list[list[float]]:
        """Restore a state.

        Args:
            state: What `state_dict` returned.
            width: Numbers in a row.

        Returns:
            The values of all rows.
        """
        self.clear()
        self.taken = state["taken"]
        values = state["values"]
        for i, (step, age) in enumerate(zip(state["steps"], state["ages"], strict=True)):
            self._steps[i], self._ages[i] = step, age
        return values + [[0.0] * width] * (self._rows - len(values))


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
