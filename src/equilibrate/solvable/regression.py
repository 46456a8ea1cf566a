"""Linear regression with label noise and with the gradient noise of real mini-batches."""

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
    """SGD on linear regression, with a new mini-batch of S examples at each step.

    Inputs are x ~ N(0, A) and labels xᵀθ* + ε with Var ε = σ². The Hessian is A. The noise depends
    on θ; its average over the stationary state, with α = η(1−ν), is

        C = (AΣA + Tr[AΣ]A + σ²A)/S,   Σ = (σ²/S) αG⁻¹/(1 − q),   q = Tr[αAG⁻¹]/S,
        G = 2(1−μ)1 − [(1−μ)/(1+μ) + 1/S]αA

    (Ziyin et al., 2022). Every average of second order is that of a `Quadratic` with this C. The
    mean square is finite if G is positive definite and q < 1.

    Args:
        design: A, a symmetric positive definite matrix, or the vector of a diagonal matrix.
        label_noise: σ², the variance of the label noise.
        batch_size: S.
        lr: Learning rate η.
        momentum: Momentum μ.
        dampening: Dampening ν.
        solution: θ*, of shape (d,). Default: the origin.

    Raises:
        ValueError: If an argument is out of range, or the mean square diverges.

    Example:
        >>> model = LinearRegression(torch.tensor([1.0, 0.5]), 1.0, batch_size=4, lr=0.5)
        >>> abs(model.fdr1_left / model.fdr1_right - 1) < 1e-12
        True
    """

    design: Tensor
    label_noise: float
    batch_size: int
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
        if not (isinstance(self.batch_size, int) and self.batch_size >= 1):
            raise ValueError(f"batch_size must be an integer of at least 1, got {self.batch_size}")
        design = positive_definite("design", self.design)
        solution = vector("solution", self.solution, like=design)
        self._set(design=design, solution=solution, hessian=design, minimum=solution)
        self._set(noise=self._mean_noise())

    def _mean_noise(self) -> Tensor:
        a, basis = torch.linalg.eigh(self.design)
        mu, alpha, size = self.momentum, self.lr * (1 - self.dampening), self.batch_size
        g = 2 * (1 - mu) - ((1 - mu) / (1 + mu) + 1 / size) * alpha * a
        q = (alpha * a / g).sum() / size
        if g.min() <= 0 or q >= 1:
            raise ValueError(
                f"lr = {self.lr} makes the mean square of SGD diverge with mini-batches of "
                f"{size}; lower lr or raise batch_size"
            )
        sigma = self.label_noise / size * alpha / g / (1 - q)
        c = (a * sigma * a + (a * sigma).sum() * a + self.label_noise * a) / size
        return (basis * c) @ basis.T

    @cached_property
    def _input_root(self) -> Tensor:
        return root(self.design)

    def gradient(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the mean of x(xᵀθ − label) over a new mini-batch, for each row of θ.

        Args:
            theta: Parameters of shape (…, d).
            generator: Source of the mini-batches.

        Returns:
            Gradients of the shape and dtype of `theta`.
        """
        distance = theta.detach().to(torch.float64) - self.minimum
        inputs = gaussian((*theta.shape[:-1], self.batch_size), self._input_root, generator)
        deviation = self.design.new_tensor([[math.sqrt(self.label_noise)]])
        errors = inputs @ distance[..., None] - gaussian(inputs.shape[:-1], deviation, generator)
        return (errors * inputs).mean(-2).to(theta.dtype)
