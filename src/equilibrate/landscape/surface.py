"""The loss over the whole training set around a model's parameters, and its mini-batch noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from equilibrate import estimates
from equilibrate.deterministic import require_deterministic
from equilibrate.estimates import Estimate
from equilibrate.landscape.checks import refuse_losses_that_are_no_mean
from equilibrate.landscape.examples import Batch, Data, Examples
from equilibrate.observables import inner

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps (outputs, targets) to the mean over the examples, as torch's loss functions do."""
Progress = Callable[[int], object]
"""Told after each chunk how many more examples were gone through, as a bar's `update` wants it."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What the mini-batch gradients at one point θ scatter."""

    total: Estimate
    """Tr C̃ = ⟦|∇f^B|²⟧."""
    connected: Estimate
    """Tr C = Tr C̃ − |∇f|²."""


@dataclass(frozen=True, slots=True)
class NoiseCurvature:
    """How steeply the loss curves along the mini-batch gradients at one point θ."""

    hessian_noise: Estimate
    """Tr(HC̃) = ⟦∇f^B·H∇f^B⟧, twice the slope of G(η) in FDR2."""
    sharpness: Estimate
    """Batch sharpness Tr(HC̃)/Tr C̃: the Hessian averaged over the directions of the noise."""


class Landscape:
    """f(θ) of a model over its training set: gradient, Hessian products, noise.

    `model`, `loss` and `data` are what a training loop has: the loss is a mean over examples, the
    data (inputs, targets) tensors or an iterable of batches. `weight_decay` λ adds ½λθ² over all
    trainable parameters. Vectors are flat, in the order of `model.parameters()`. The model is read
    where it stands at each call and never changed; the data are gone through in chunks of `chunk`
    examples, and mini-batches drawn by a generator of its own.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> nn.init.ones_(model.weight).item()
    1.0
    >>> x = torch.tensor([[1.0], [3.0]])
    >>> land = Landscape(
    ...     model, lambda out, y: (out - y).square().mean() / 2, (x, torch.zeros(2, 1))
    ... )
    >>> land.value(), land.gradient().tolist()  # f = ½·⟨x²⟩θ² with ⟨x²⟩ = 5
    (2.5, [5.0])
    >>> land.hessian_product(torch.tensor([2.0])).tolist()
    [10.0]
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Data,
        *,
        weight_decay: float = 0.0,
        chunk: int = 1000,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        if not callable(loss):
            raise TypeError(
                f"loss must be a function of outputs and targets, got {type(loss).__name__}: the "
                "order is model, loss, data"
            )
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 example, got {chunk}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
        self.model = model
        self.loss = loss
        self.examples = Examples(data)
        self.weight_decay = weight_decay
        self.chunk = chunk
        self.generator = torch.Generator().manual_seed(seed)
        self.progress = progress
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        if not self.trainable:
            raise ValueError("model has no trainable parameter: none has requires_grad")
        require_deterministic(model)
        first = next(self.examples.chunks(16))
        refuse_losses_that_are_no_mean(self._example_loss, first)

    def parameters(self) -> Tensor:
        """θ, a flat copy."""
        return flat(self.trainable)

    def value(self) -> float:
        """f(θ), with the L2 term."""
        theta = self.parameters()
        with torch.no_grad():
            loss = self._averaged(self._example_loss)
        return (loss + self.weight_decay / 2 * inner(theta, theta)).item()

    def gradient(self) -> Tensor:
        """∇f(θ), in double precision."""
        gradient = self._averaged(self._example_gradient)
        return gradient.add_(self.parameters(), alpha=self.weight_decay)

    def hessian_product(self, vector: Tensor) -> Tensor:
        """H(θ)·`vector`, in double precision, by differentiating the gradient once more."""
        product = self._averaged(lambda batch: self._example_hessian_product(batch, vector))
        return product.add_(vector, alpha=self.weight_decay)

    def batch_gradient(self, batch: Batch) -> Tensor:
        """∇f^B(θ) of one mini-batch, with the L2 term, in the model's own precision."""
        return self._example_gradient(batch) + self.weight_decay * self.parameters()

    def batch_hessian_product(self, batch: Batch, vector: Tensor) -> Tensor:
        """H^B(θ)·`vector` of one mini-batch, with the L2 term, in the model's own precision."""
        return self._example_hessian_product(batch, vector) + self.weight_decay * vector

    def noise(self, batch: int | None, draws: int = 100) -> Noise:
        """Tr C̃ and Tr C at θ, from the gradients of `draws` mini-batches and one full gradient.

        The connected part is the mean of |∇f^B − ∇f|², and Tr C̃ is this and |∇f|². Where the data
        are tensors the mini-batches are independent; batches of an iterable are taken as they come.
        """
        full = self.gradient()
        deviations = (self.batch_gradient(b).double() - full for b in self._drawn(batch, draws))
        connected = estimates.mean(torch.stack([inner(d, d) for d in deviations]), independent=True)
        total = replace(connected, value=connected.value + inner(full, full).item())
        return Noise(total, connected)

    def noise_curvature(
        self, batch: int | None, draws: int = 100, *, whole_hessian: bool = True
    ) -> NoiseCurvature:
        """Tr(HC̃) and Tr(HC̃)/Tr C̃ at θ, by Hessian products along mini-batch gradients.

        Each draw costs a pass over the data, or, with `whole_hessian=False`, one more mini-batch:
        drawn independently of the first, its Hessian has mean H given the gradient, so that the
        estimate stays unbiased and is only noisier.
        """
        curvatures: list[Tensor] = []
        squares: list[Tensor] = []
        drawn = self._drawn(batch, draws if whole_hessian else 2 * draws)
        for first in drawn:
            g = self.batch_gradient(first)
            bent = (
                self.hessian_product(g)
                if whole_hessian
                else self.batch_hessian_product(next(drawn), g)
            )
            curvatures.append(inner(g.to(bent), bent))
            squares.append(inner(g, g))
        curvature, square = torch.stack(curvatures), torch.stack(squares)
        return NoiseCurvature(
            estimates.mean(curvature, independent=True),
            estimates.ratio(curvature, square, independent=True),
        )

    def _example_loss(self, batch: Batch) -> Tensor:
        device = self.trainable[0].device
        inputs, targets = (t.to(device) for t in batch)
        return self.loss(self.model(inputs), targets)

    def _example_gradient(self, batch: Batch) -> Tensor:
        with torch.enable_grad():
            loss = self._example_loss(batch)
            return flat(torch.autograd.grad(loss, self.trainable, materialize_grads=True))

    def _example_hessian_product(self, batch: Batch, vector: Tensor) -> Tensor:
        shaped = [
            v.view_as(p).to(p)
            for v, p in zip(
                vector.split([p.numel() for p in self.trainable]), self.trainable, strict=True
            )
        ]
        with torch.enable_grad():
            loss = self._example_loss(batch)
            slopes = torch.autograd.grad(
                loss, self.trainable, create_graph=True, materialize_grads=True
            )
            along = torch.stack([(s * v).sum() for s, v in zip(slopes, shaped, strict=True)]).sum()
            if not along.requires_grad:  # a loss that is linear in every parameter
                return torch.zeros_like(vector)
            return flat(torch.autograd.grad(along, self.trainable, materialize_grads=True))

    def _averaged(self, of_batch: Callable[[Batch], Tensor]) -> Tensor:
        """The mean over all examples, in double precision, of a mean over each chunk."""
        seen, total = 0, torch.zeros((), device=self.trainable[0].device)
        for batch in self.examples.chunks(self.chunk):
            size = len(batch[0])
            total = total + size * of_batch(batch).double()
            seen += size
            if self.progress is not None:
                self.progress(size)
        return total.div_(seen)

    def _drawn(self, batch: int | None, draws: int) -> Iterator[Batch]:
        if draws < 2:
            raise ValueError(f"draws must be at least 2 for there to be an error bar, got {draws}")
        return self.examples.mini_batches(batch, draws, self.generator)


def connected_scaling(batch: int, examples: int) -> float:
    """(1 − |B|/N_s)/|B|, to which the connected noise C is proportional in |B| = `batch`.

    Mini-batches are drawn from N_s = `examples` without replacement; the factor that does not
    depend on |B| is the covariance of single examples' gradients, with N_s − 1 in its denominator.

    >>> connected_scaling(50, examples=100), connected_scaling(100, examples=100)
    (0.01, 0.0)
    """
    if not 1 <= batch <= examples:
        raise ValueError(f"batch must be between 1 and {examples}, got {batch}")
    return (1 - batch / examples) / batch


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One flat vector of several tensors, without their history.

    >>> flat([torch.ones(2, 1), torch.zeros(1)]).tolist()
    [1.0, 1.0, 0.0]
    """
    return torch.cat([t.detach().reshape(-1) for t in tensors])
