"""Quadratic loss with noise of constant covariance, and its approximation by an SDE."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equilibrate.solvable.base import SolvableSGD
from equilibrate.solvable.matrices import (
    covariance,
    gaussian,
    positive_definite,
    product_trace,
    root,
    vector,
)


@dataclass(frozen=True, eq=False)
class Quadratic(SolvableSGD):
    """SGD on f = ½(θ−θ*)ᵀH(θ−θ*) with g = H(θ−θ*) + ξ, ξ Gaussian of constant covariance C.

    SGD is stable if η(1−ν)h < 2(1+μ) for every eigenvalue h of H.

    Args:
        hessian: H, a symmetric positive definite matrix, or the vector of a diagonal matrix.
        noise: C, a symmetric positive semidefinite matrix, or the vector of a diagonal matrix.
        lr: Learning rate η.
        momentum: Momentum μ.
        dampening: Dampening ν.
        minimum: θ*, of shape (d,). Default: the origin.

    Raises:
        ValueError: If an argument is out of range, or SGD is unstable at this learning rate.

    Example:
        >>> model = Quadratic(torch.tensor([1.0]), noise=torch.tensor([1.0]), lr=1.0)
        >>> model.position_covariance.item()  # ηc / [h(2 − ηh)]
        1.0
        >>> model.sde().position_covariance.item()  # ηc / 2h
        0.5
    """

    hessian: Tensor
    noise: Tensor
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    minimum: Tensor = None  # pyright: ignore[reportAssignmentType]  # replaced at construction

    def __post_init__(self) -> None:
        self._check_settings()
        hessian = positive_definite("hessian", self.hessian)
        noise = covariance("noise", self.noise, like=hessian)
        self._set(hessian=hessian, noise=noise)
        self._set(minimum=vector("minimum", self.minimum, like=hessian))
        largest = torch.linalg.eigvalsh(hessian).max().item()
        bound = 2 * (1 + self.momentum) / ((1 - self.dampening) * largest)
        if self.lr >= bound:
            raise ValueError(
                f"lr = {self.lr} makes SGD diverge along the eigenvector of the hessian with the "
                f"largest eigenvalue ({largest:.6g}); use lr < 2(1 + momentum) / ((1 - dampening) "
                f"* eigenvalue) = {bound:.6g}"
            )

    def gradient(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Draw g = H(θ−θ*) + ξ for each row of θ.

        Args:
            theta: Parameters of shape (…, d).
            generator: Source of the noise.

        Returns:
            Gradients of the shape and dtype of `theta`.

        Example:
            Run any optimizer on the quadratic:

            >>> model = Quadratic(torch.ones(3), noise=torch.ones(3), lr=0.1)
            >>> theta = torch.nn.Parameter(torch.zeros(3))
            >>> optimizer = torch.optim.Adam([theta], lr=0.1)
            >>> theta.grad = model.gradient(theta, torch.Generator().manual_seed(0))
            >>> optimizer.step()
        """
        mean = self.full_gradient(theta.detach().to(torch.float64))
        return (mean + gaussian(theta.shape[:-1], self._noise_root, generator)).to(theta.dtype)

    @cached_property
    def _noise_root(self) -> Tensor:
        return root(self.noise)

    def simulate_thinned(
        self,
        start: tuple[Tensor, Tensor],
        measurements: int,
        every: int,
        generator: torch.Generator,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw the state after every k-th step, without making the steps between.

        (θ, v) is Gaussian, and k steps of mean evolution A leave it with the covariance
        S − AᵏS(Aᵏ)ᵀ, where S is the stationary one. The cost does not depend on k.

        Args:
            start: Parameters θ and velocities v at the start, each of shape (R, d).
            measurements: Number of states to draw.
            every: The number k of steps between them.
            generator: Source of the noise.

        Yields:
            Parameters θ and velocities v of all replicas.
        """
        evolution = torch.linalg.matrix_power(self.transition, every)
        noise = root(self.state_covariance - evolution @ self.state_covariance @ evolution.T)
        state = torch.cat([start[0] - self.minimum, start[1]], dim=-1)
        for _ in range(measurements):
            state = state @ evolution.T + gaussian(state.shape[:-1], noise, generator)
            offset, velocity = state.chunk(2, dim=-1)
            yield self.minimum + offset, velocity

    def potential(self, theta: Tensor, velocity: Tensor) -> Tensor:
        """Return Φ = [(1−μ)|θ|²/(2η) + μθ·v]/(1−ν), for which Σ(L − R) of FDR1 is Φ_0 − Φ_n.

        Args:
            theta: Parameters of shape (…, d).
            velocity: The velocity of the step that led to θ.
        """
        norm = (1 - self.momentum) / (2 * self.lr) * theta.square().sum(-1)
        return (norm + self.momentum * (theta * velocity).sum(-1)) / (1 - self.dampening)

    def sde(self) -> SDEPrediction:
        """Return the predictions of a stochastic differential equation for the same settings.

        It has the connected noise C where SGD has C̃, so that HΣ + ΣH = TC with the temperature
        T = η(1−ν)/(1−μ).
        """
        temperature = self.lr * (1 - self.dampening) / (1 - self.momentum)
        h, basis = torch.linalg.eigh(self.hessian)
        modes = temperature * (basis.T @ self.noise @ basis) / (h[:, None] + h[None, :])
        covariance = basis @ modes @ basis.T
        left = product_trace(self.hessian, covariance)
        return SDEPrediction(
            covariance,
            fdr1_left=left,
            fdr1_right=temperature / 2 * self.noise.trace().item(),
            excess_loss=left / 2,
            full_gradient_square=product_trace(self.hessian @ covariance, self.hessian),
            hessian_noise=product_trace(self.hessian, self.noise),
        )

    def residual_deviation(self, steps: int) -> float:
        """Return the standard deviation of L̄/R̄ − 1 for averages over n stationary steps.

        The residual telescopes: n(L̄ − R̄) = Φ_0 − Φ_n (`potential`). Its variance is
        2[Var Φ − Cov(Φ_0, Φ_n)]. R̄ is replaced by its mean, which is accurate if n exceeds a few
        relaxation times. Without noise it is nan, because L̄/R̄ = 0/0.

        Args:
            steps: Number of steps n.

        Raises:
            ValueError: If `steps` is less than 1.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if self.fdr1_right == 0:
            return math.nan
        norm, product = (1 - self.momentum) / (2 * self.lr), self.momentum
        variance = self._form_covariance(norm, product, steps=0)
        drift = 2 * (variance - self._form_covariance(norm, product, steps))
        return math.sqrt(drift) / ((1 - self.dampening) * steps * self.fdr1_right)

    def _form_covariance(self, norm: float, product: float, steps: int) -> float:
        """Return the covariance of norm·|θ|² + product·θ·v with itself `steps` later.

        By Wick's theorem, since (θ, v) is Gaussian.
        """
        weights = self.hessian.new_tensor([[norm, product / 2], [product / 2, 0.0]])
        form = torch.kron(weights, torch.eye(len(self.hessian)).to(weights))
        lagged = torch.linalg.matrix_power(self.transition, steps) @ self.state_covariance
        mean = torch.cat([self.minimum, torch.zeros_like(self.minimum)])
        weighted = form @ lagged @ form
        return 2 * product_trace(weighted, lagged.T) + 4 * (mean @ weighted @ mean).item()


@dataclass(frozen=True, eq=False)
class SDEPrediction:
    """Predictions of a stochastic differential equation for SGD, correct only for ηh → 0.

    The names are those of the exact values in `Quadratic`.
    """

    position_covariance: Tensor
    """Σ."""
    fdr1_left: float
    """Tr(HΣ)."""
    fdr1_right: float
    """(T/2)Tr C, which equals `fdr1_left`."""
    excess_loss: float
    """½Tr(HΣ)."""
    full_gradient_square: float
    """Tr(HΣH) = (T/2)Tr(HC)."""
    hessian_noise: float
    """Tr(HC)."""
