"""Value, gradient, Hessian products and mini-batch noise of a loss over a whole training set."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.landscape.data import Data, TrainingData, check_batch
from equilibrate.landscape.mean_loss import Batch, Loss, require_mean_loss
from equilibrate.observables import inner


@dataclass(frozen=True, slots=True)
class Noise:
    """The mini-batch noise at one point θ, where ⟦…⟧ is the mean over mini-batches."""

    total: Estimate
    """Tr C̃ = ⟦|∇f^B|²⟧."""
    connected: Estimate
    """Tr C = Tr C̃ − |∇f|²."""


@dataclass(frozen=True, slots=True)
class NoiseCurvature:
    """The curvature of the loss along the mini-batch gradients at one point θ."""

    hessian_noise: Estimate
    """Tr(HC̃) = ⟦∇f^B·H∇f^B⟧, twice the slope of G(η) in FDR2."""
    sharpness: Estimate
    """Batch sharpness Tr(HC̃)/Tr C̃, the curvature averaged over the directions of the noise."""


class Landscape:
    """The loss f(θ) of a model over its training set: value, gradient, Hessian products, noise.

    Vectors are flat, in the order of `model.parameters()`, and contain the trainable parameters
    only. Each call uses the current parameters of the model and does not change them. The global
    random state is not changed either.

    Args:
        model: A deterministic model (call `model.eval()` for dropout or batch normalisation).
        loss: Maps (outputs, targets) to the mean loss over the examples.
        data: (inputs, targets), or an iterable of such batches.
        weight_decay: λ of the L2 term ½λ|θ|² over all trainable parameters.
        chunk_size: Maximum number of examples in a forward pass over the data.
        seed: Seed of the generator that draws mini-batches.

    Raises:
        TypeError: If `model` is not a module, `loss` is not callable, or `data` is of another type.
        ValueError: If an argument is out of range, the model has no trainable parameter or is not
            deterministic, or the loss is not a mean over examples.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> nn.init.ones_(model.weight).item()
        1.0
        >>> def half_square(outputs, targets):
        ...     return (outputs - targets).square().mean() / 2
        >>> data = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
        >>> landscape = Landscape(model, half_square, data)
        >>> landscape.value(), landscape.gradient().tolist()  # f = ½⟨x²⟩θ² with ⟨x²⟩ = 5
        (2.5, [5.0])
        >>> landscape.hessian_product(torch.tensor([2.0])).tolist()
        [10.0]
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Data,
        *,
        weight_decay: float = 0.0,
        chunk_size: int = 1000,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not callable(loss):
            raise TypeError(
                f"loss must be a function of (outputs, targets), got {type(loss).__name__}: the "
                "order of the arguments is model, loss, data"
            )
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {weight_decay}")
        self.model = model
        self.loss = loss
        self.data = TrainingData(data)
        self.weight_decay = weight_decay
        self.chunk_size = chunk_size
        self.generator = torch.Generator().manual_seed(seed)
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        if not self.trainable:
            raise ValueError("model has no trainable parameter: set requires_grad of at least one")
        first = next(self.data.chunks(sys.maxsize))  # tensors are one chunk
        require_mean_loss(model, loss, first)

    def copy(self) -> Landscape:
        """Return the landscape of a copy of the model, with the same data and generator."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other.trainable = [p for p in other.model.parameters() if p.requires_grad]
        return other

    def parameters(self) -> Tensor:
        """Return a flat copy of the trainable parameters θ."""
        return _flat(self.trainable)

    def value(self) -> float:
        """Return f(θ), with the L2 term."""
        theta = self.parameters()
        with torch.no_grad():
            loss = self._averaged(self._batch_loss)
        return (loss + self.weight_decay / 2 * inner(theta, theta)).item()

    def gradient(self) -> Tensor:
        """Return ∇f(θ), with the L2 term, in double precision."""
        gradient = self._averaged(self._loss_gradient)
        return gradient.add_(self.parameters(), alpha=self.weight_decay)

    def hessian_product(self, vector: Tensor) -> Tensor:
        """Return H(θ)u, with the L2 term, in double precision.

        Args:
            vector: u, a flat vector with one number for each trainable parameter. Another shape
                raises a ValueError.
        """
        product = self._averaged(lambda batch: self._loss_hessian_product(batch, vector))
        return product.add_(vector, alpha=self.weight_decay)

    def batch_gradient(self, batch: Batch) -> Tensor:
        """Return ∇f^B(θ) of one mini-batch, with the L2 term, in the precision of the model.

        Args:
            batch: (inputs, targets).
        """
        return self._loss_gradient(batch) + self.weight_decay * self.parameters()

    def batch_hessian_product(self, batch: Batch, vector: Tensor) -> Tensor:
        """Return H^B(θ)u of one mini-batch, with the L2 term, in the precision of the model.

        Args:
            batch: (inputs, targets).
            vector: u, as in `hessian_product`.
        """
        return self._loss_hessian_product(batch, vector) + self.weight_decay * vector

    def noise(self, batch_size: int | None, draws: int = 100) -> Noise:
        """Estimate Tr C̃ and Tr C at θ from mini-batch gradients and one full gradient.

        Tr C is the mean of |∇f^B − ∇f|², and Tr C̃ = Tr C + |∇f|². Mini-batches of tensors are
        independent. The batches of an iterable are used in its order.

        Args:
            batch_size: Number of examples in a mini-batch; None if the data is an iterable.
            draws: Number of mini-batches.

        Returns:
            Both traces with error bars.
        """
        full = self.gradient()
        deviations = (
            self.batch_gradient(b).double() - full for b in self._mini_batches(batch_size, draws)
        )
        connected = estimates.mean(torch.stack([inner(d, d) for d in deviations]), independent=True)
        total = replace(connected, value=connected.value + inner(full, full).item())
        return Noise(total, connected)

    def noise_curvature(
        self, batch_size: int | None, draws: int = 100, *, full_hessian: bool = True
    ) -> NoiseCurvature:
        """Estimate Tr(HC̃) and Tr(HC̃)/Tr C̃ at θ by Hessian products along mini-batch gradients.

        Args:
            batch_size: Number of examples in a mini-batch; None if the data is an iterable.
            draws: Number of mini-batch gradients.
            full_hessian: Whether to use the Hessian of all data, at the cost of a pass over the
                data for each draw. Otherwise the Hessian of a second, independent mini-batch is
                used: the estimate is still unbiased, but its variance is larger.

        Returns:
            Both quantities with error bars.
        """
        curvatures: list[Tensor] = []
        squares: list[Tensor] = []
        batches = self._mini_batches(batch_size, draws if full_hessian else 2 * draws)
        for batch in batches:
            g = self.batch_gradient(batch)
            product = (
                self.hessian_product(g)
                if full_hessian
                else self.batch_hessian_product(next(batches), g)
            )
            curvatures.append(inner(g.to(product), product))
            squares.append(inner(g, g))
        curvature, square = torch.stack(curvatures), torch.stack(squares)
        return NoiseCurvature(
            estimates.mean(curvature, independent=True),
            estimates.ratio(curvature, square, independent=True),
        )

    def _batch_loss(self, batch: Batch) -> Tensor:
        device = self.trainable[0].device
        inputs, targets = (t.to(device) for t in check_batch(batch))
        return self.loss(self.model(inputs), targets)

    def _loss_gradient(self, batch: Batch) -> Tensor:
        with torch.enable_grad():
            loss = self._batch_loss(batch)
            return _flat(torch.autograd.grad(loss, self.trainable, materialize_grads=True))

    def _loss_hessian_product(self, batch: Batch, vector: Tensor) -> Tensor:
        sizes = [p.numel() for p in self.trainable]
        if not isinstance(vector, Tensor) or vector.shape != (sum(sizes),):
            got = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
            raise ValueError(
                f"vector must be a tensor of shape ({sum(sizes)},), with one number for each "
                f"trainable parameter, got {got}"
            )
        parts = zip(vector.split(sizes), self.trainable, strict=True)
        shaped = [v.view_as(p).to(p) for v, p in parts]
        with torch.enable_grad():
            loss = self._batch_loss(batch)
            slopes = torch.autograd.grad(
                loss, self.trainable, create_graph=True, materialize_grads=True
            )
            along = torch.stack([(s * v).sum() for s, v in zip(slopes, shaped, strict=True)]).sum()
            if not along.requires_grad:  # the loss is linear in all parameters
                return torch.zeros_like(vector)
            return _flat(torch.autograd.grad(along, self.trainable, materialize_grads=True))

    def _averaged(self, function: Callable[[Batch], Tensor]) -> Tensor:
        """Return the mean over all examples of a function that is a mean over each chunk."""
        seen, total = 0, torch.zeros((), device=self.trainable[0].device)
        for batch in self.data.chunks(self.chunk_size):
            size = len(batch[0])
            total = total + size * function(batch).double()
            seen += size
        return total.div_(seen)

    def _mini_batches(self, batch_size: int | None, draws: int) -> Iterator[Batch]:
        if draws < 2:
            raise ValueError(f"draws must be at least 2 to compute an error bar, got {draws}")
        return self.data.mini_batches(batch_size, draws, self.generator)


def connected_scaling(batch_size: int, num_examples: int) -> float:
    """Return (1 − |B|/N_s)/|B|, the dependence of the connected noise C on the batch size.

    It holds for mini-batches drawn without replacement. C is this factor times the covariance of
    the gradients of single examples, with N_s − 1 in its denominator.

    Args:
        batch_size: |B|.
        num_examples: N_s.

    Raises:
        ValueError: If `batch_size` is not between 1 and `num_examples`.

    Example:
        >>> connected_scaling(50, num_examples=100), connected_scaling(100, num_examples=100)
        (0.01, 0.0)
    """
    if not 1 <= batch_size <= num_examples:
        raise ValueError(f"batch_size must be between 1 and {num_examples}, got {batch_size}")
    return (1 - batch_size / num_examples) / batch_size


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])
