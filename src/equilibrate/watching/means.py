"""(θ − m)·g for running means m of the parameters θ: all that a forecast needs of a step.

`choose` selects the implementation: a Triton kernel that reads every tensor once in a single launch
on an NVIDIA GPU, plain torch operations elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from equilibrate.watching.sums import Optionals, dot, uses_triton

Lists = Sequence[Sequence[Tensor]]


class Means(Protocol):
    """Running means of the tensors of one bucket: fixed shapes, one device, one dtype."""

    def measure(
        self, params: Sequence[Tensor], gradients: Optionals, out: Tensor, shares: Sequence[float]
    ) -> None:
        """Write Σ (θ − m)·g for each mean, in float64, into `out`, then move the means towards θ.

        Args:
            params: The parameters θ.
            gradients: The gradients g; None counts as zero.
            out: Where to write, of shape (means,).
            shares: By which share of θ − m each mean moves.
        """

    def tensors(self) -> Lists:
        """Return the means: for each of them a list of tensors with the shapes of the parameters.

        Changing these tensors in place changes the means.
        """
        ...


def choose(params: Sequence[Tensor], count: int, weights: Sequence[float]) -> Means:
    """Return the fastest implementation for these parameters.

    Args:
        params: The parameters, of which the shapes, device and dtype matter.
        count: Number of means.
        weights: The weight of each parameter in the sum.
    """
    if uses_triton(params):
        from equilibrate.watching.kernels import TritonMeans

        return TritonMeans(params, count, weights)
    return TorchMeans(params, count, weights)


def precision(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the means of parameters: at least single precision."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class TorchMeans:
    """`Means` in plain torch operations, tensor by tensor, on any device that has float64.

    (θ − m)·g is taken as θ·g − m·g, which needs no memory for the difference. Its rounding error is
    some 1e-7 of |θ||g|/√P for P parameters, while the noise of the sample is about |θ − m||g|/√P.

    Args:
        params: The parameters.
        count: Number of means.
        weights: The weight of each parameter.
    """

    def __init__(self, params: Sequence[Tensor], count: int, weights: Sequence[float]) -> None:
        self._dtype = precision(params[0].dtype)
        self._means = [
            [torch.zeros_like(p, dtype=self._dtype, requires_grad=False) for p in params]
            for _ in range(count)
        ]
        one = torch.eye(count, dtype=torch.float64, device="cpu")
        block = torch.cat([one.new_ones(count, 1), -one], dim=1)
        # From θ·g and m·g of all tensors to the sums of their differences.
        self._matrix = torch.cat([w * block for w in weights], dim=1).to(params[0].device)

    def measure(
        self, params: Sequence[Tensor], gradients: Optionals, out: Tensor, shares: Sequence[float]
    ) -> None:
        """Write the sums and move the means; see `Means.measure`."""
        cells: list[Tensor] = []
        zero = torch.zeros((), dtype=self._dtype, device=params[0].device)
        # One tensor after the other, so that it is still in the cache for the next mean.
        for p, g, *means in zip(params, gradients, *self._means, strict=True):
            theta = p if p.dtype is self._dtype else p.to(self._dtype)
            vector = g if g is None or g.dtype is self._dtype else g.to(self._dtype)
            if vector is None:
                cells += [zero] * (1 + len(means))
            else:
                cells += [dot(x, vector).to(self._dtype) for x in (theta, *means)]
            for m, share in zip(means, shares, strict=True):
                m.lerp_(theta, share)
        torch.mv(self._matrix, torch.stack(cells).double(), out=out)

    def tensors(self) -> Lists:
        """Return the means; see `Means.tensors`."""
        return self._means
