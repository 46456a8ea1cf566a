"""Base of the solvable models: stationary averages in closed form, and the simulator."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from equilibrate.observables import Snapshot
from equilibrate.solvable.matrices import gaussian, product_trace, root


class SolvableSGD(ABC):
    """SGD with momentum on a quadratic loss, solved exactly.

    All averages follow from the Hessian and the mean noise covariance. In terms of w = v/(1−ν),
    dampening only rescales the learning rate, to α = η(1−ν). Let θ be measured from the minimum and
    c_ij be the mean noise covariance between modes i, j of the Hessian. Stationarity of ⟨θθ⟩, ⟨θw⟩
    and ⟨ww⟩ is a linear system with the solution

        ⟨w_i w_j⟩ = c_ij / {1 − μ² − α(h_i − μh_j)(h_j − μh_i) / [(1−μ)(h_i + h_j)]}
        ⟨θ_i θ_j⟩ = α⟨w_i w_j⟩ (1+μ) / (h_i + h_j)
        ⟨θ_i w_j⟩ = α⟨w_i w_j⟩ (h_i − μh_j) / [(1−μ)(h_i + h_j)]

    The noise must have zero mean given the past; its distribution does not matter otherwise.
    Without noise every average is zero, and the ratio of two averages is undefined.
    """

    hessian: Tensor
    """H, of shape (d, d)."""
    noise: Tensor
    """C, the covariance of the gradient noise, averaged over the stationary state."""
    minimum: Tensor
    """θ*, of shape (d,)."""
    lr: float
    """η."""
    momentum: float
    """μ."""
    dampening: float
    """ν."""

    @cached_property
    def _covariances(self) -> tuple[Tensor, Tensor, Tensor]:
        """⟨θθᵀ⟩, ⟨θvᵀ⟩ and ⟨vvᵀ⟩, θ measured from the minimum."""
        h, basis = torch.linalg.eigh(self.hessian)
        c = basis.T @ self.noise @ basis
        mu, alpha = self.momentum, self.lr * (1 - self.dampening)
        hi, hj = h[:, None], h[None, :]
        cross = (hi - mu * hj) / ((1 - mu) * (hi + hj))
        ww = c / (1 - mu**2 - alpha * (hj - mu * hi) * cross)
        xx = alpha * (1 + mu) / (hi + hj) * ww
        xv = (1 - self.dampening) * alpha * cross * ww
        vv = (1 - self.dampening) ** 2 * ww
        return basis @ xx @ basis.T, basis @ xv @ basis.T, basis @ vv @ basis.T

    @property
    def position_covariance(self) -> Tensor:
        """Σ = ⟨(θ−θ*)(θ−θ*)ᵀ⟩."""
        return self._covariances[0]

    @property
    def cross_covariance(self) -> Tensor:
        """⟨(θ−θ*)vᵀ⟩, with the velocity v of the step that led to θ."""
        return self._covariances[1]

    @property
    def velocity_covariance(self) -> Tensor:
        """⟨vvᵀ⟩."""
        return self._covariances[2]

    @property
    def state_covariance(self) -> Tensor:
        """Covariance of (θ, v) stacked into one vector of length 2d."""
        xx, xv, vv = self._covariances
        return torch.cat([torch.cat([xx, xv], dim=1), torch.cat([xv.T, vv], dim=1)])

    @property
    def transition(self) -> Tensor:
        """The 2d×2d matrix that maps the mean of (θ−θ*, v) to its value after one step."""
        one = torch.eye(len(self.hessian), dtype=torch.float64, device=self.hessian.device)
        pull = (1 - self.dampening) * self.hessian
        position = torch.cat([one - self.lr * pull, self.lr * self.momentum * one], dim=1)
        return torch.cat([position, torch.cat([-pull, self.momentum * one], dim=1)])

    @property
    def relaxation_time(self) -> float:
        """Number of steps in which the slowest mode of θ decays by a factor 1/e."""
        radius = torch.linalg.eigvals(self.transition).abs().max().item()
        return -1 / math.log(radius) if radius > 0 else 0.0

    @property
    def noise_matrix(self) -> Tensor:
        """C̃ = ⟨ggᵀ⟩ = C + HΣH, the paper's full two-point noise matrix."""
        return self.noise + self.hessian @ self.position_covariance @ self.hessian

    @property
    def fdr1_left(self) -> float:
        """Left side of FDR1 and FDR1′, ⟨θ·g⟩ = ⟨θ·∇f⟩ = Tr(HΣ), for any position of the minimum."""
        return product_trace(self.hessian, self.position_covariance)

    @property
    def excess_loss(self) -> float:
        """⟨f − f₀⟩ = ½Tr(HΣ), the decrease of the loss if the learning rate went to zero."""
        return self.fdr1_left / 2

    @property
    def full_gradient_square(self) -> float:
        """⟨(∇f)²⟩ = Tr(HΣH), the paper's G(η)."""
        return product_trace(self.hessian @ self.position_covariance, self.hessian)

    @property
    def hessian_noise(self) -> float:
        """Tr(HC̃). Without momentum FDR2 is ⟨(∇f)²⟩ = (η/2)Tr(HC̃)."""
        return product_trace(self.hessian, self.noise_matrix)

    @property
    def fdr1_right(self) -> float:
        """Right side of FDR1′, (1+μ)/(2(1−ν)) η⟨v²⟩; without momentum (η/2)Tr C̃ (FDR1)."""
        coefficient = (1 + self.momentum) * self.lr / (2 * (1 - self.dampening))
        return coefficient * self.velocity_covariance.trace().item()

    @property
    def velocity_gradient(self) -> float:
        """⟨v·∇f⟩ = ⟨v·g⟩ with the velocity before the step."""
        return product_trace(self.hessian, self.cross_covariance)

    @property
    def velocity_curvature(self) -> float:
        """⟨v′ᵀHv′⟩ = ⟨vᵀHv⟩."""
        return product_trace(self.hessian, self.velocity_covariance)

    @property
    def fdr2_left(self) -> float:
        """Left side of FDR2, (1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩."""
        damped = (1 - self.dampening) * self.full_gradient_square
        return damped - self.momentum * self.velocity_gradient

    @property
    def fdr2_right(self) -> float:
        """Right side of FDR2, (η/2)⟨v′ᵀHv′⟩. The factor ½ is missing in the paper's appendix."""
        return self.lr / 2 * self.velocity_curvature

    def loss(self, theta: Tensor) -> Tensor:
        """Return f(θ) − f₀ = ½(θ−θ*)ᵀH(θ−θ*).

        Args:
            theta: Parameters of shape (…, d).
        """
        return ((theta - self.minimum) * self.full_gradient(theta)).sum(-1) / 2

    def full_gradient(self, theta: Tensor) -> Tensor:
        """Return ∇f = H(θ−θ*).

        Args:
            theta: Parameters of shape (…, d).
        """
        return (theta - self.minimum) @ self.hessian

    @abstractmethod
    def gradient(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Draw an independent mini-batch gradient g for each row of θ.

        Args:
            theta: Parameters of shape (…, d).
            generator: Source of the noise.

        Returns:
            Gradients of the shape and dtype of `theta`.
        """

    def stationary(self, replicas: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw replicas from the Gaussian with the stationary mean and covariance of (θ, v).

        For `Quadratic` this is the stationary distribution. For `LinearRegression` averages of
        second order are exact from the first step on, while higher moments still have to relax.

        Args:
            replicas: Number of replicas R.
            generator: Source of the draws.

        Returns:
            Parameters θ and velocities v, each of shape (R, d). `simulate` takes them as its start.
        """
        draw = gaussian((replicas,), root(self.state_covariance), generator)
        offset, velocity = draw.chunk(2, dim=-1)
        return self.minimum + offset, velocity

    def step(self, parameters: Tensor, velocity: Tensor, gradient: Tensor) -> Snapshot:
        """Make one step of SGD: v′ = μv − (1−ν)g, θ′ = θ + ηv′.

        Args:
            parameters: θ before the step, of shape (…, d).
            velocity: v before the step.
            gradient: The mini-batch gradient g at θ.

        Returns:
            The step. `Snapshot.parameters_after` and `Snapshot.velocity_after` are θ′ and v′.
        """
        after = self.momentum * velocity - (1 - self.dampening) * gradient
        return Snapshot(
            parameters,
            gradient,
            after,
            self.lr,
            self.momentum,
            self.dampening,
            velocity_before=velocity,
        )

    def simulate(
        self, start: tuple[Tensor, Tensor], steps: int, generator: torch.Generator
    ) -> Iterator[Snapshot]:
        """Run SGD with independent noise at every step.

        Args:
            start: Parameters θ and velocities v at the start, each of shape (R, d) for R replicas.
            steps: Number of steps.
            generator: Source of the noise.

        Yields:
            Each step, of all replicas.

        Example:
            >>> from equilibrate.solvable import Quadratic
            >>> model = Quadratic(torch.tensor([2.0]), noise=torch.tensor([1.0]), lr=0.1)
            >>> generator = torch.Generator().manual_seed(0)
            >>> start = model.stationary(replicas=10_000, generator=generator)
            >>> *_, last = model.simulate(start, steps=20, generator=generator)
            >>> measured = model.full_gradient(last.parameters).square().sum(-1).mean().item()
            >>> abs(measured / model.full_gradient_square - 1) < 0.05
            True
        """
        parameters, velocity = start
        for _ in range(steps):
            snapshot = self.step(parameters, velocity, self.gradient(parameters, generator))
            yield snapshot
            parameters, velocity = snapshot.parameters_after, snapshot.velocity_after

    def _check_settings(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")
        if not 0 <= self.dampening < 1:
            raise ValueError(f"dampening must lie in [0, 1), got {self.dampening}")

    def _set(self, **values: Tensor) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the models are frozen dataclasses
