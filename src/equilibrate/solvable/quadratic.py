"""Quadratic loss with noise of constant covariance, and what an SDE would say of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equilibrate.solvable.base import Harmonic, SolvableSGD
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

    `hessian` and `noise` are symmetric matrices, or vectors that stand for diagonal ones; `minimum`
    is θ*, the origin unless given. SGD is stable for η(1−ν)h < 2(1+μ) along every mode.

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
        stiffest = torch.linalg.eigvalsh(hessian).max().item()
        bound = 2 * (1 + self.momentum) / ((1 - self.dampening) * stiffest)
        if self.lr >= bound:
            raise ValueError(
                f"lr = {self.lr} makes SGD diverge along the stiffest direction of the hessian "
                f"(curvature {stiffest:.6g}); use lr < 2(1 + momentum) / ((1 - dampening) "
                f"* curvature) = {bound:.6g}"
            )

    def gradient(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """H(θ−θ*) + ξ for each row of θ of shape (…, d), in θ's own dtype.

        Any optimizer can be run on it:

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

    def sde(self) -> SDEPrediction:
        """What a stochastic differential equation predicts for the same settings."""
        temperature = self.lr * (1 - self.dampening) / (1 - self.momentum)
        return SDEPrediction(self.hessian, self.noise, temperature)

    @property
    def norm_variance(self) -> float:
        """Var N = 2TrΣ² + 4θ*ᵀΣθ* of the squared norm N = |θ|²."""
        return self._form_covariance(1.0, 0.0, steps=0)

    def norm_autocorrelation(self, steps: int) -> float:
        """ρ_N(n), the correlation of N = |θ|² with itself n = `steps` later; nan without noise."""
        if self.norm_variance == 0:
            return math.nan
        return self._form_covariance(1.0, 0.0, steps) / self.norm_variance

    def residual_deviation(self, steps: int) -> float:
        """Standard deviation of L̄/R̄ − 1, the averages taken over n = `steps` stationary steps.

        The residual telescopes: n(L̄ − R̄) = (Φ_0 − Φ_n)/(1−ν) with Φ = (1−μ)N/(2η) + μθ·v, so the
        variance is 2[Var Φ − Cov(Φ_0, Φ_n)]/(1−ν)²; R̄ is replaced by its mean, which is right for n
        beyond a few relaxation times. Without momentum that is sqrt(2 Var N (1 − ρ_N(n))) /
        (nη²⟨g²⟩). Without noise it is nan, as L̄/R̄ = 0/0 is.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if self.right == 0:
            return math.nan
        norm, product = (1 - self.momentum) / (2 * self.lr), self.momentum
        variance = self._form_covariance(norm, product, steps=0)
        drift = 2 * (variance - self._form_covariance(norm, product, steps))
        return math.sqrt(drift) / ((1 - self.dampening) * steps * self.right)

    def _form_covariance(self, norm: float, product: float, steps: int) -> float:
        """Covariance of norm·|θ|² + product·θ·v with itself `steps` later, by Wick's theorem."""
        if steps < 0:
            raise ValueError(f"steps must not be negative, got {steps}")
        weights = self.hessian.new_tensor([[norm, product / 2], [product / 2, 0.0]])
        form = torch.kron(weights, torch.eye(len(self.hessian)).to(weights))
        lagged = torch.linalg.matrix_power(self.transition, steps) @ self.state_covariance
        mean = torch.cat([self.minimum, torch.zeros_like(self.minimum)])
        carried = form @ lagged @ form
        return 2 * product_trace(carried, lagged.T) + 4 * (mean @ carried @ mean).item()


@dataclass(frozen=True, eq=False)
class SDEPrediction(Harmonic):
    """What a stochastic differential equation says of SGD: right as ηh → 0, wrong beyond.

    It has the connected noise C where SGD has C̃, hence HΣ + ΣH = TC at the `temperature`
    T = η(1−ν)/(1−μ), and ⟨(∇f)²⟩ = (T/2)Tr(HC). The names are those of `Quadratic`, for comparison.
    """

    hessian: Tensor
    noise: Tensor
    temperature: float

    @property
    def position_covariance(self) -> Tensor:
        """Σ, from HΣ + ΣH = TC."""
        h, basis = torch.linalg.eigh(self.hessian)
        modes = self.temperature * (basis.T @ self.noise @ basis) / (h[:, None] + h[None, :])
        return basis @ modes @ basis.T

    @property
    def noise_matrix(self) -> Tensor:
        """C, where SGD has C̃ = C + HΣH."""
        return self.noise

    @property
    def right(self) -> float:
        """(T/2)Tr C: equal to `left`, and as wrong."""
        return self.temperature / 2 * self.noise.trace().item()
