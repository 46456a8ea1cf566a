"""Linear regression with label noise, and the noise of true mini-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from equilibrate.solvable.base import SolvableSGD
from equilibrate.solvable.matrices import gaussian, positive_definite, root, vector


@dataclass(frozen=True, eq=False)
class LinearRegression(SolvableSGD):
    """SGD on linear regression, each step with a fresh mini-batch of S = `batch` examples.

    Inputs x ~ N(0, A) with A = `design`, labels xᵀθ* + ε with Var ε = σ² = `label_noise` and
    θ* = `solution`, the origin unless given. The Hessian is A. The noise depends on θ; its average
    over the stationary state, with α = η(1−ν), is

        C = (AΣA + Tr[AΣ]A + σ²A)/S,   Σ = (σ²/S) αG⁻¹/(1 − q),   q = Tr[αAG⁻¹]/S,
        G = 2(1−μ)1 − [(1−μ)/(1+μ) + 1/S]αA

    (Ziyin et al., 2022), and every average of two factors is that of a `Quadratic` with this C. The
    mean square stays finite as long as G is positive and q < 1.

    >>> model = LinearRegression(torch.tensor([1.0, 0.5]), label_noise=1.0, batch=4, lr=0.5)
    >>> abs(model.left / model.right - 1) < 1e-12
    True
    """

    design: Tensor
    label_noise: float
    batch: int
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    solution: Tensor = None  # pyright: ignore[reportAssignmentType]  # replaced at construction
    hessian: Tensor = field(init=False, repr=False)
    noise: Tensor = field(init=False, repr=False)
    minimum: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_settings()
        if not (self.label_noise >= 0 and math.isfinite(self.label_noise)):
            raise ValueError(
                f"label_noise must be a variance, finite and at least 0, got {self.label_noise}"
            )
        if not (isinstance(self.batch, int) and self.batch >= 1):
            raise ValueError(f"batch must be an integer of at least 1, got {self.batch}")
        design = positive_definite("design", self.design)
        solution = vector("solution", self.solution, like=design)
        self._set(design=design, solution=solution, hessian=design, minimum=solution)
        self._set(noise=self._mean_noise())

    def _mean_noise(self) -> Tensor:
        a, basis = torch.linalg.eigh(self.design)
        mu, alpha, size = self.momentum, self.lr * (1 - self.dampening), self.batch
        g = 2 * (1 - mu) - ((1 - mu) / (1 + mu) + 1 / size) * alpha * a
        q = (alpha * a / g).sum() / size
        if g.min() <= 0 or q >= 1:
            raise ValueError(
                f"lr = {self.lr} makes the mean square of SGD diverge with mini-batches of "
                f"{size}; lower lr or raise batch"
            )
        sigma = self.label_noise / size * alpha / g / (1 - q)
        c = (a * sigma * a + (a * sigma).sum() * a + self.label_noise * a) / size
        return (basis * c) @ basis.T

    @cached_property
    def _input_root(self) -> Tensor:
        return root(self.design)

    def gradient(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Mean of x(xᵀθ − label) over a fresh mini-batch for each row of θ, in θ's own dtype."""
        distance = theta.detach().to(torch.float64) - self.minimum
        inputs = gaussian((*theta.shape[:-1], self.batch), self._input_root, generator)
        deviation = self.design.new_tensor([[math.sqrt(self.label_noise)]])
        errors = inputs @ distance[..., None] - gaussian(inputs.shape[:-1], deviation, generator)
        return (errors * inputs).mean(-2).to(theta.dtype)
