"""Measures (θ − m)·g of the parameters of one bucket at some steps, without waiting for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from equilibrate._engine.arithmetic.means import GivenMeans, Lists, choose
from equilibrate._engine.sharding import Layout, as_dtensor, local, local_like


class Tracker:
    """Samples of (θ − m)·g for the parameters of one group, device and dtype.

    Args:
        optimizer: The optimizer that moves the parameters.
        group: Index of their parameter group.
        params: The parameters.
        layout: How the parameters of the optimizer are distributed over processes.
        decays: The decay of each mean m from one measurement to the next.
        rows: Number of samples to keep.
        share: What to write for a step that was made; the total over all trackers is 1.
        given: The mean of each parameter, if somebody else keeps them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: int,
        params: Sequence[Tensor],
        layout: Layout,
        decays: Sequence[float],
        rows: int,
        *,
        share: float,
        given: Sequence[Tensor] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self.group = group
        self.params = list(params)
        self._distributed = any(as_dtensor(p) is not None for p in params)
        parts = self._local(self.params)
        self.device = parts[0].device
        weights = [layout.shards(p) / layout.processes for p in params]
        self._means = (
            choose(parts, decays, weights)
            if given is None
            else GivenMeans([local(m) for m in given], weights)
        )
        # The last column tells whether the step was made, or skipped by gradient scaling.
        self.samples = torch.zeros(rows, len(decays) + 1, dtype=torch.float64, device=self.device)
        self._share = share
        self._saved: list[Tensor] | None = None

    def save(self) -> None:
        """Copy the parameters before a step whose gradient is not known yet."""
        self._saved = [p.detach().clone() for p in self._local(self.params)]

    def measure(self, row: int, count: int) -> None:
        """Write a sample and move the means.

        The parameters are those of the last `save`, if there was one since the last measurement.

        Args:
            row: Where to write the sample.
            count: How often the means have been moved since they were started, with this time.
        """
        params, self._saved = self._saved or self._local(self.params), None
        sample = self.samples[row]
        values, made = sample[:-1], sample[-1]
        self._means.measure(params, self._gradients(), values, count)
        if self._optimizer.param_groups[self.group].get("maximize", False):
            values.neg_()
        made.fill_(self._share)
        if (scale := getattr(self._optimizer, "grad_scale", None)) is not None:
            values.div_(_on(scale, values))
        if (found := getattr(self._optimizer, "found_inf", None)) is not None:
            sample.masked_fill_(_on(found, sample) > 0, 0.0)

    def means(self) -> Lists:
        """Return the local parts of the means: for each of them a list of tensors."""
        return self._means.tensors()

    def _gradients(self) -> Sequence[Tensor | None]:
        gradients = [p.grad for p in self.params]
        if not self._distributed:
            return gradients
        return [local_like(p, g) for p, g in zip(self.params, gradients, strict=True)]

    def _local(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [local(t) for t in tensors] if self._distributed else tensors


def _on(number: Tensor, like: Tensor) -> Tensor:
    return number.detach().reshape(()).to(like.device, non_blocking=True)
