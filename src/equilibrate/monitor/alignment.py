"""Samples of θ·g for each parameter, from which scale-invariant weights are recognised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equilibrate.watching.parameters import Bucket
from equilibrate.watching.sums import flatten, send

SAMPLES = 8
"""Samples kept of each parameter, the newest."""


class Alignments:
    """Σ θ_i g_i and Σ (θ_i g_i)² of each parameter of a bucket, at a few steps.

    The gradient is read after the step, since a closure or a captured step computes it inside; θ is
    copied before it. Both sums are additive over the shards of a parameter. A parameter without a
    gradient, or with one that is zero or not finite, has no sample at that step.

    Args:
        bucket: The parameters.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        shape = SAMPLES, len(bucket.params), 2
        self._ring = torch.zeros(shape, dtype=torch.float64, device=bucket.device)
        self._shares = send([[share] for share in bucket.shares()], torch.float64, bucket.device)
        self._copies: list[Tensor] = []
        self._seen = self._taken = 0

    def before(self) -> None:
        """Copy the parameters before a measured step, if a sample is due.

        Samples are taken at the first measured steps of a window, and then at those whose number
        is a power of two, so that their cost grows with the logarithm of the window only.
        """
        self._seen += 1
        if self._seen <= SAMPLES or self._seen.bit_count() == 1:
            self._copies = [p.detach().clone() for p in self._bucket.local()]

    def after(self) -> None:
        """Take a sample after the step, if one is due."""
        if not self._copies:
            return
        copies, self._copies = self._copies, []
        gradients = self._bucket.local_like([p.grad for p in self._bucket.params])
        sums = [_products(theta, g) for theta, g in zip(copies, gradients, strict=True)]
        self._ring[self._taken % SAMPLES] = torch.stack(sums)
        self._taken += 1

    def restart(self) -> None:
        """Take samples often again, as at the beginning of a window. Old ones are kept."""
        self._seen = 0

    def sums(self) -> Tensor:
        """Return this process's samples, to be added up over all processes."""
        return self._ring * self._shares

    def state_dict(self, total: Tensor) -> dict[str, object]:
        """Return the state, given what `sums` returns, added up over all processes."""
        return {"samples": total, "seen": self._seen, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, which may come from another number of processes."""
        shares = self._shares * self._bucket.layout.processes
        self._ring.copy_(state["samples"].to(self._ring.device) / shares)
        self._seen, self._taken = state["seen"], state["taken"]


def alignments(total: Tensor) -> list[tuple[float, int]]:
    """Return the root mean square of z over the samples of each parameter, and their number.

    Args:
        total: The samples over all processes, (samples, parameters, 2).

    >>> alignments(torch.tensor([[[2.0, 8.0]], [[0.0, 8.0]], [[0.0, 0.0]]]).double())
    [(0.5, 2)]
    """
    along, square = total.double().unbind(-1)
    valid = (square > 0) & square.isfinite()
    z = torch.where(valid, along.square() / square, 0.0)
    count = valid.sum(0)
    rms = (z.sum(0) / count).sqrt()
    return list(zip(rms.tolist(), count.tolist(), strict=True))


def _products(theta: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64, device=theta.device)
    theta, gradient = flatten(theta, gradient)
    dtype = torch.promote_types(theta.dtype, torch.float32)
    product = theta.to(dtype) * gradient.to(dtype)
    square = torch.linalg.vector_norm(product, dtype=torch.float64).square()
    return torch.stack([product.sum(dtype=torch.float64), square])
