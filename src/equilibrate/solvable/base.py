"""What the solvable models share: stationary averages in closed form, and the simulator."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equilibrate.solvable.matrices import gaussian, product_trace, root


@dataclass(frozen=True, eq=False)
class State:
    """Where R replicas of SGD stand: `position` θ and `velocity` v, each of shape (R, d)."""

    position: Tensor
    velocity: Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """One step of R replicas: θ, v before it, the mini-batch gradient g at θ, and θ′, v′ after."""

    position: Tensor
    velocity: Tensor
    gradient: Tensor
    next_position: Tensor
    next_velocity: Tensor

    @property
    def next_state(self) -> State:
        """The state from which the following step starts."""
        return State(self.next_position, self.next_velocity)


class Harmonic(ABC):
    """Stationary averages over a quadratic loss, from the covariance Σ of θ and the noise in it.

    SGD, and the differential equation that is taken for it, differ in these two alone.
    """

    hessian: Tensor

    @property
    @abstractmethod
    def position_covariance(self) -> Tensor:
        """Σ = ⟨(θ−θ*)(θ−θ*)ᵀ⟩."""

    @property
    @abstractmethod
    def noise_matrix(self) -> Tensor:
        """C̃ = ⟨ggᵀ⟩, the paper's full two-point noise matrix."""

    @property
    def left(self) -> float:
        """Left of FDR1 and FDR1′: ⟨θ·g⟩ = ⟨θ·∇f⟩ = Tr(HΣ), wherever the minimum is."""
        return product_trace(self.hessian, self.position_covariance)

    @property
    def excess_loss(self) -> float:
        """⟨f − f₀⟩ = ½Tr(HΣ): how far the loss would fall if the learning rate went to zero."""
        return self.left / 2

    @property
    def full_gradient_square(self) -> float:
        """⟨(∇f)²⟩ = Tr(HΣH), the paper's G(η)."""
        return product_trace(self.hessian @ self.position_covariance, self.hessian)

    @property
    def hessian_noise(self) -> float:
        """Tr(HC̃): without momentum FDR2 says ⟨(∇f)²⟩ = (η/2)Tr(HC̃)."""
        return product_trace(self.hessian, self.noise_matrix)


class SolvableSGD(Harmonic):
    """SGD with momentum on a quadratic loss: all averages follow from its Hessian and mean noise.

    Written in w = v/(1−ν), dampening only rescales the learning rate, to α = η(1−ν). For modes i, j
    of the Hessian, with c_ij the mean noise covariance between them and θ measured from its
    minimum, stationarity of ⟨θθ⟩, ⟨θw⟩ and ⟨ww⟩ is a linear system whose solution is

        ⟨w_i w_j⟩ = c_ij / {1 − μ² − α(h_i − μh_j)(h_j − μh_i) / [(1−μ)(h_i + h_j)]}
        ⟨θ_i θ_j⟩ = α⟨w_i w_j⟩ (1+μ) / (h_i + h_j)
        ⟨θ_i w_j⟩ = α⟨w_i w_j⟩ (h_i − μh_j) / [(1−μ)(h_i + h_j)]

    The noise must have zero mean given the past; beyond that its law does not matter. Without noise
    every average is zero, and the ratio of two of them undefined.
    """

    noise: Tensor
    minimum: Tensor
    lr: float
    momentum: float
    dampening: float

    @cached_property
    def _covariances(self) -> tuple[Tensor, Tensor, Tensor]:
        """⟨θθᵀ⟩, ⟨θvᵀ⟩ and ⟨vvᵀ⟩, θ measured from the minimum."""
        h, basis = torch.linalg.eigh(self.hessian)
        c = basis.T @ self.noise @ basis
        mu, alpha = self.momentum, self.lr * (1 - self.dampening)
        hi, hj = h[:, None], h[None, :]
        lean = (hi - mu * hj) / ((1 - mu) * (hi + hj))
        ww = c / (1 - mu**2 - alpha * (hj - mu * hi) * lean)
        xx = alpha * (1 + mu) / (hi + hj) * ww
        xv = (1 - self.dampening) * alpha * lean * ww
        vv = (1 - self.dampening) ** 2 * ww
        return basis @ xx @ basis.T, basis @ xv @ basis.T, basis @ vv @ basis.T

    @property
    def position_covariance(self) -> Tensor:
        """Σ = ⟨(θ−θ*)(θ−θ*)ᵀ⟩."""
        return self._covariances[0]

    @property
    def cross_covariance(self) -> Tensor:
        """⟨(θ−θ*)vᵀ⟩, v being the velocity that led to θ."""
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
        """The 2d×2d matrix that carries the mean of (θ−θ*, v) over one step."""
        one = torch.eye(len(self.hessian), dtype=torch.float64, device=self.hessian.device)
        pull = (1 - self.dampening) * self.hessian
        position = torch.cat([one - self.lr * pull, self.lr * self.momentum * one], dim=1)
        return torch.cat([position, torch.cat([-pull, self.momentum * one], dim=1)])

    @property
    def relaxation_time(self) -> float:
        """Steps in which the slowest mode of θ decays by 1/e; |θ−θ*|² needs half as many."""
        radius = torch.linalg.eigvals(self.transition).abs().max().item()
        return -1 / math.log(radius) if radius > 0 else 0.0

    @property
    def noise_matrix(self) -> Tensor:
        """C̃ = ⟨ggᵀ⟩ = C + HΣH, the paper's full two-point noise matrix."""
        return self.noise + self.hessian @ self.position_covariance @ self.hessian

    @property
    def right(self) -> float:
        """Right of FDR1′: (1+μ)/(2(1−ν)) η⟨v²⟩; it is (η/2)Tr C̃ without momentum (FDR1)."""
        scale = (1 + self.momentum) * self.lr / (2 * (1 - self.dampening))
        return scale * self.velocity_covariance.trace().item()

    @property
    def velocity_gradient(self) -> float:
        """⟨v·∇f⟩ with the velocity before the step; ⟨v·g⟩ is the same."""
        return product_trace(self.hessian, self.cross_covariance)

    @property
    def velocity_curvature(self) -> float:
        """⟨v′ᵀHv′⟩; at stationarity v before the step would give the same."""
        return product_trace(self.hessian, self.velocity_covariance)

    @property
    def second_left(self) -> float:
        """Left of FDR2 with momentum: (1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩."""
        damped = (1 - self.dampening) * self.full_gradient_square
        return damped - self.momentum * self.velocity_gradient

    @property
    def second_right(self) -> float:
        """Right of FDR2 with momentum: (η/2)⟨v′ᵀHv′⟩ (the paper's appendix lacks the ½)."""
        return self.lr / 2 * self.velocity_curvature

    @property
    def lagged_gradient_product(self) -> float:
        """⟨g_t·g_{t+1}⟩ of successive mini-batch gradients; −⟨(∇f)²⟩ without momentum.

        It is ⟨g·H(θ′−θ*)⟩ = Tr(HΣH) + ημ⟨∇f·Hv⟩ − η(1−ν)Tr(HC̃).
        """
        drift = product_trace(self.hessian @ self.cross_covariance, self.hessian)
        pull = self.momentum * drift - (1 - self.dampening) * self.hessian_noise
        return self.full_gradient_square + self.lr * pull

    def loss(self, theta: Tensor) -> Tensor:
        """f(θ) − f₀ = ½(θ−θ*)ᵀH(θ−θ*) for θ of shape (…, d)."""
        return ((theta - self.minimum) * self.full_gradient(theta)).sum(-1) / 2

    def full_gradient(self, theta: Tensor) -> Tensor:
        """∇f = H(θ−θ*) for θ of shape (…, d)."""
        return (theta - self.minimum) @ self.hessian

    @abstractmethod
    def gradient(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """A mini-batch gradient g for each row of θ of shape (…, d), in θ's own dtype."""

    def stationary(self, replicas: int, generator: torch.Generator) -> State:
        """Replicas drawn from the Gaussian with the stationary mean and covariance of (θ, v).

        For `Quadratic` that is the stationary law itself. For `LinearRegression` averages of two
        factors are exact from the first step on, while higher moments still have to relax.
        """
        draw = gaussian((replicas,), root(self.state_covariance), generator)
        position, velocity = draw.chunk(2, dim=-1)
        return State(self.minimum + position, velocity)

    def step(self, state: State, gradient: Tensor) -> Step:
        """One step of SGD: v′ = μv − (1−ν)g, θ′ = θ + ηv′."""
        velocity = self.momentum * state.velocity - (1 - self.dampening) * gradient
        position = state.position + self.lr * velocity
        return Step(state.position, state.velocity, gradient, position, velocity)

    def simulate(self, state: State, steps: int, generator: torch.Generator) -> Iterator[Step]:
        """Run SGD from `state`, with fresh noise at every step, and yield each step as it is made.

        >>> from equilibrate.solvable import Quadratic
        >>> model = Quadratic(torch.tensor([2.0]), noise=torch.tensor([1.0]), lr=0.1)
        >>> generator = torch.Generator().manual_seed(0)
        >>> start = model.stationary(replicas=10_000, generator=generator)
        >>> *_, last = model.simulate(start, steps=20, generator=generator)
        >>> measured = model.full_gradient(last.position).square().sum(-1).mean().item()
        >>> abs(measured / model.full_gradient_square - 1) < 0.05
        True
        """
        for _ in range(steps):
            step = self.step(state, self.gradient(state.position, generator))
            yield step
            state = step.next_state

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
