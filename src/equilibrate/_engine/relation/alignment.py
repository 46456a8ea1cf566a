"""Samples of θ·g for each parameter, from which scale-invariant weights are recognised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibrate._engine.arithmetic.dots import flatten
from equilibrate._engine.relation.coefficients import host_to
from equilibrate._engine.sharding import Layout, local, local_like

SAMPLES = 8
"""Samples kept of each parameter, the newest."""


def is_due(step: int, every: int) -> bool:
    """Return whether to take a sample at a measured step of a window.

    Samples are taken at the first measured steps, and then at those whose number is a power of two,
    so that the cost of a window grows with the logarithm of its length only.

    Args:
        step: Number of the step in the window, from 1.
        every: Steps from one measured step to the next; the first step is measured, too.

    >>> [step for step in range(1, 40) if is_due(step, every=1)]
    [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
    """
    number = step if every == 1 else step // every + 1
    return number <= SAMPLES or number.bit_count() == 1


class Alignments:
    """Samples of each parameter of some buckets.

    Args:
        buckets: The parameters of each bucket, all on one device; none to take no samples.
        layout: How the parameters of the optimizer are distributed over processes.
    """

    def __init__(self, buckets: Sequence[Sequence[Tensor]], layout: Layout) -> None:
        self._buckets = [_Bucket(params, layout) for params in buckets]
        self._taken = 0
        self._due = False

    def before(self, step: int, every: int) -> None:
        """Prepare for a measured step, given its number in the window; see `is_due`."""
        self._due = bool(self._buckets) and is_due(step, every)
        if self._due:
            for bucket in self._buckets:
                bucket.copy()

    def after(self) -> None:
        """Take a sample after the step, if one is due."""
        if self._due:
            for bucket in self._buckets:
                bucket.sample(self._taken % SAMPLES)
            self._taken += 1
            self._due = False

    def sums(self) -> list[Tensor]:
        """Return this process's samples of each bucket, for `Layout.total`."""
        return [bucket.sums() for bucket in self._buckets]

    def state_dict(self, totals: Sequence[Tensor]) -> dict[str, Any]:
        """Return the state, given what `sums` returns, added up over all processes."""
        return {"samples": list(totals), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, which may come from another number of processes."""
        self._taken = state["taken"]
        for bucket, samples in zip(self._buckets, state["samples"], strict=True):
            bucket.load(samples)


class _Bucket:
    """Σ θ_i g_i and Σ (θ_i g_i)² of each parameter of a bucket, at a few steps.

    The gradient is read after the step, since a closure or a captured step computes it inside; θ is
    copied before it. Both sums are additive over the shards of a parameter. A parameter without a
    gradient, or with one that is zero or not finite, has no sample at that step.
    """

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        self._params = list(params)
        device = local(params[0]).device
        self._ring = torch.zeros(SAMPLES, len(params), 2, dtype=torch.float64, device=device)
        self._shards = host_to(self._ring, [[float(layout.shards(p))] for p in params])
        self._processes = layout.processes
        self._copies: list[Tensor] = []

    def copy(self) -> None:
        self._copies = [local(p).detach().clone() for p in self._params]

    def sample(self, place: int) -> None:
        copies, self._copies = self._copies, []
        with torch.no_grad():
            pairs = zip(self._params, copies, strict=True)
            sums = [_sums(copy, local_like(p, p.grad)) for p, copy in pairs]
            self._ring[place] = torch.stack(sums)

    def sums(self) -> Tensor:
        return self._ring * (self._shards / self._processes)

    def load(self, total: Tensor) -> None:
        self._ring.copy_(total.to(self._ring.device) / self._shards)


def alignments(total: Tensor) -> list[tuple[float, int]]:
    """Return the root mean square of z over the samples of each parameter, and their number.

    Args:
        total: The samples over all processes, (samples, parameters, 2).

    >>> alignments(torch.tensor([[[3.0, 25.0]], [[4.0, 25.0]], [[0.0, 0.0]]]).double())
    [(0.7071067811865476, 2)]
    """
    along, square = total.double().unbind(-1)
    valid = (square > 0) & square.isfinite()
    z = torch.where(valid, along.square() / square, 0.0)
    count = valid.sum(0)
    rms = (z.sum(0) / count).sqrt()
    return list(zip(rms.tolist(), count.tolist(), strict=True))


def _sums(theta: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64, device=theta.device)
    theta, gradient = flatten(theta, gradient)
    dtype = torch.promote_types(theta.dtype, torch.float32)
    product = theta.to(dtype) * gradient.to(dtype)
    return torch.stack([product.sum(dtype=torch.float64), _square(product)])


def _square(vector: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vector, dtype=torch.float64).square()
