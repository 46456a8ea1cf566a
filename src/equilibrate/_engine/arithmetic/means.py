"""(θ − m)·g for running means m of the parameters θ: all that a forecast needs of a step.

`Means` is the interface, `choose` the one place that selects an implementation: a Triton kernel
that reads every tensor once in a single launch on an NVIDIA GPU, plain torch operations elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from equilibrate._engine.arithmetic.dots import dot
from equilibrate._engine.arithmetic.sums import Optionals, is_dense

Lists = Sequence[Sequence[Tensor]]


class Means(Protocol):
    """Exponential means of the tensors of one bucket: fixed shapes, one device, one dtype."""

    def measure(
        self, params: Sequence[Tensor], gradients: Optionals, out: Tensor, count: int
    ) -> None:
        """Write Σ (θ − m)·g for each mean, in float64, into `out`, then move the means towards θ.

        A mean moves by the share (1−b)/(1−b^count), so that it is unbiased from the first time on.
        A gradient that is None counts as zero.

        Args:
            params: The parameters θ.
            gradients: The gradients g.
            out: Where to write, of shape (means,).
            count: How often the means have been moved since they were started, this time included.
                The first time `out` has no meaning.
        """
        ...

    def tensors(self) -> Lists:
        """Return the means: for each of them a list of tensors with the shapes of the parameters.

        Changing these tensors in place changes the means.
        """
        ...


def choose(params: Sequence[Tensor], decays: Sequence[float], weights: Sequence[float]) -> Means:
    """Return the fastest implementation for these parameters.

    Args:
        params: The parameters, of which the shapes, device and dtype matter.
        decays: The decay b of each mean from one measurement to the next.
        weights: The weight of each parameter in the sum.
    """
    if params[0].is_cuda and find_spec("triton") is not None and all(map(is_dense, params)):
        from equilibrate._engine.arithmetic.means_triton import TritonMeans

        return TritonMeans(params, decays, weights)
    return TorchMeans(params, decays, weights)


def precision(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the means of parameters: at least single precision."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def first_shares(decays: Sequence[float], count: int) -> list[float]:
    """Return by which share of θ − m each mean m moves when it is moved for the count-th time.

    >>> first_shares([0.5], 1), first_shares([0.5], 2), first_shares([0.5], 100)
    ([1.0], [0.6666666666666666], [0.5])
    """
    return [(1 - b) / (1 - b**count) for b in decays]


class TorchMeans:
    """`Means` in plain torch operations, tensor by tensor, on any device that has float64.

    (θ − m)·g is taken as θ·g − m·g, which needs no memory for the difference. Its rounding error is
    some 1e-7 of |θ||g|/√P for P parameters, while the noise of the sample is about |θ − m||g|/√P.

    Args:
        params: The parameters.
        decays: The decay of each mean.
        weights: The weight of each parameter.
    """

    def __init__(
        self, params: Sequence[Tensor], decays: Sequence[float], weights: Sequence[float]
    ) -> None:
        self._dtype = precision(params[0].dtype)
        self._decays = tuple(decays)
        self._means = [
            [torch.zeros_like(p, dtype=self._dtype, requires_grad=False) for p in params]
            for _ in decays
        ]
        self._matrix = _differences(len(decays), weights).to(params[0].device)

    def measure(
        self, params: Sequence[Tensor], gradients: Optionals, out: Tensor, count: int
    ) -> None:
        """Write the sums and move the means; see `Means.measure`."""
        shares = first_shares(self._decays, count)
        cells: list[Tensor] = []
        zero: Tensor | None = None
        # One tensor after the other, so that it is still in the cache for the next mean.
        for p, g, *means in zip(params, gradients, *self._means, strict=True):
            theta = p if p.dtype is self._dtype else p.to(self._dtype)
            vector = g if g is None or g.dtype is self._dtype else g.to(self._dtype)
            if vector is None:
                zero = torch.zeros((), dtype=self._dtype, device=p.device) if zero is None else zero
                cells += [zero] * (1 + len(means))
            else:
                cells.append(dot(theta, vector))
            for m, share in zip(means, shares, strict=True):
                if vector is not None:
                    cells.append(dot(m, vector))
                m.lerp_(theta, share)
        torch.mv(self._matrix, torch.stack(cells).double(), out=out)

    def tensors(self) -> Lists:
        """Return the means; see `Means.tensors`."""
        return self._means


def _differences(means: int, weights: Sequence[float]) -> Tensor:
    """Return the matrix that takes θ·g and m·g of all tensors to the sums of their differences."""
    one = torch.eye(means, dtype=torch.float64, device="cpu")
    block = torch.cat([one.new_ones(means, 1), -one], dim=1)
    return torch.cat([weight * block for weight in weights], dim=1)


class GivenMeans:
    """`Means` that somebody else keeps, such as the parameters of an averaged model.

    Args:
        means: The mean of each parameter, with the shapes of the parameters.
        weights: The weight of each parameter.
    """

    def __init__(self, means: Sequence[Tensor], weights: Sequence[float]) -> None:
        self._means = list(means)
        self._weights = torch.tensor(weights, dtype=torch.float64, device=means[0].device)

    def measure(
        self, params: Sequence[Tensor], gradients: Optionals, out: Tensor, count: int
    ) -> None:
        """Write the sum; the means are left alone. See `Means.measure`."""
        zero = out.new_zeros(())
        exact = precision(params[0].dtype)
        cells = [
            zero if g is None else dot(p.detach().to(exact) - m.to(exact), g.to(exact)).double()
            for p, g, m in zip(params, gradients, self._means, strict=True)
        ]
        torch.dot(torch.stack(cells), self._weights, out=out[0])

    def tensors(self) -> Lists:
        """Return nothing: these means are saved by whoever keeps them."""
        return []
