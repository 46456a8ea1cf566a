"""FDR2 at one learning rate: four estimates of the same quantity, each with an error bar.

(a) `epoch_ends`, the paper's estimate: full-batch gradients at the ends of reshuffled epochs.
(b) `full_batch`: full-batch gradients at random steps of a run with independent batches.
(c) `successive`: −⟨g_t·g_{t+1}⟩ of this run. It needs no full-batch gradient, and no momentum.
(d) `curvature`: the right side of FDR2, (η/2)⟨v′ᵀHv′⟩, by Hessian products along the steps. Without
    momentum it is (η/2)⟨Tr(HC̃)⟩.

(a) is biased towards zero. The noise of a reshuffled epoch sums to zero, which reduces the variance
of every mode that is slower than an epoch. This holds at every step of the epoch, so full-batch
gradients at other steps of a reshuffled epoch are biased too. Independent batches are free of this
bias, and (d), which depends on the size of the noise only, is hardly affected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.landscape.data import Batch
from equilibrate.landscape.landscape import Landscape
from equilibrate.observables import Snapshot, fdr2_left, fdr2_right, successive
from equilibrate.relations import Measurement, fdr1


@dataclass(frozen=True, slots=True)
class FDR2Estimates:
    """Both sides of FDR2 at one learning rate: (a), (b), (c) the left side, (d) the right side.

    All four estimate (1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩, which is G(η) = ⟨(∇f)²⟩ without momentum.
    """

    lr: float
    """Learning rate η."""
    epoch_ends: Estimate | None
    """(a) Full-batch gradients at the ends of reshuffled epochs, if there were any."""
    full_batch: Estimate
    """(b) Full-batch gradients, independent batches."""
    successive: Estimate | None
    """(c) Successive mini-batch gradients; None with momentum, where their mean is another one."""
    curvature: Estimate
    """(d) Hessian products."""
    fdr1: Measurement
    """FDR1 over the same run. If it does not hold, the run was not stationary."""

    def __str__(self) -> str:
        rows = {
            "(a) full batch at epoch ends, reshuffled": self.epoch_ends,
            "(b) full batch, independent batches": self.full_batch,
            "(c) successive mini-batches": self.successive,
            "(d) Hessian products": self.curvature,
        }
        title = f"FDR2 at lr {self.lr:g}, 95 % intervals (FDR1 residual {self.fdr1.residual:+.3f})"
        return "\n".join(
            [title]
            + [f"{name:<42}{e}  ({e.count} samples, {e.method})" for name, e in rows.items() if e]
        )


def estimate_fdr2(
    landscape: Landscape,
    *,
    lr: float,
    batch_size: int | None,
    momentum: float = 0.0,
    dampening: float = 0.0,
    steps: int = 2000,
    num_full_gradients: int = 40,
    num_hessian_products: int = 400,
    reshuffled_epochs: int = 0,
    burn_in: int = 100,
) -> FDR2Estimates:
    """Continue training of an equilibrated model and estimate both sides of FDR2.

    A copy of the model is trained. After `burn_in` steps come `steps` steps with independent
    batches, for the estimates (b), (c) and (d), and then the reshuffled epochs, for (a).

    Args:
        landscape: The loss of a model that has equilibrated at `lr`. The model is not changed.
        lr: Learning rate η.
        batch_size: Number of examples in a mini-batch; None if the data is an iterable.
        momentum: Momentum μ.
        dampening: Dampening ν.
        steps: Number of steps with independent batches.
        num_full_gradients: Number of these steps, chosen at random, with a full-batch gradient.
        num_hessian_products: Number of these steps, chosen at random, with a Hessian product on
            another mini-batch.
        reshuffled_epochs: Number of reshuffled epochs. The ends of their second half are used.
        burn_in: Number of steps before the measurement.

    Returns:
        The four estimates, and FDR1 over the same run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> data = torch.randn(50, 2), torch.randn(50, 1)
        >>> def half_square(outputs, targets):
        ...     return (outputs - targets).square().mean() / 2
        >>> landscape = Landscape(torch.nn.Linear(2, 1), half_square, data)
        >>> found = estimate_fdr2(landscape, lr=0.1, batch_size=5, steps=400)
        >>> found.full_batch.count, found.successive.count, found.curvature.count
        (40, 399, 400)
    """
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    for name, value in (
        ("num_full_gradients", num_full_gradients),
        ("num_hessian_products", num_hessian_products),
    ):
        if not 2 <= value <= steps:
            raise ValueError(f"{name} must be between 2 and steps = {steps}, got {value}")
    landscape = landscape.copy()
    examples, generator = landscape.data, landscape.generator
    full_gradient_steps, hessian_steps = (
        set(torch.randperm(steps, generator=generator)[:count].tolist())
        for count in (num_full_gradients, num_hessian_products)
    )
    batches = examples.mini_batches(batch_size, burn_in + steps, generator)
    per_epoch = examples.steps_per_epoch(batch_size) if reshuffled_epochs else 0
    if reshuffled_epochs and batch_size is not None:
        batches = chain(batches, examples.reshuffled(batch_size, generator))
    run = sgd(landscape, batches, lr, momentum, dampening)
    full_batch: list[Tensor] = []
    lagged: list[Tensor] = []
    curvature: list[Tensor] = []
    epoch_ends: list[Tensor] = []

    def independent() -> Iterator[Snapshot]:
        previous = None
        for t, s in enumerate(islice(run, burn_in, burn_in + steps)):
            if previous is not None:
                lagged.append(successive(previous, s))
            previous = s.gradient
            if t in full_gradient_steps:
                full_batch.append(fdr2_left(s, landscape.gradient().to(s.gradient)))
            if t in hessian_steps:
                [other] = examples.mini_batches(batch_size, 1, generator)
                product = landscape.batch_hessian_product(other, s.velocity_after)
                curvature.append(fdr2_right(s, product))
            yield s

    relation = fdr1().measure(independent())
    if reshuffled_epochs:
        # One step more than these epochs have: the end of one epoch is the start of the next.
        starts = islice(run, None, reshuffled_epochs * per_epoch + 1, per_epoch)
        for epoch, s in enumerate(starts):
            if epoch > reshuffled_epochs // 2:
                epoch_ends.append(fdr2_left(s, landscape.gradient().to(s.gradient)))
    return FDR2Estimates(
        lr,
        _mean(epoch_ends) if epoch_ends else None,
        _mean(full_batch),
        None if momentum else _mean(lagged),
        _mean(curvature),
        relation,
    )


def sgd(
    landscape: Landscape,
    batches: Iterable[Batch],
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
) -> Iterator[Snapshot]:
    """Train the model of a landscape by SGD as in the paper: v′ = μv − (1−ν)g, θ′ = θ + ηv′.

    Unlike `torch.optim.SGD` it dampens the first step too, and without momentum.

    Args:
        landscape: The loss of the model, which is changed.
        batches: The mini-batch of each step.
        lr: Learning rate η.
        momentum: Momentum μ.
        dampening: Dampening ν.

    Yields:
        Each step. The model moves when the next one is requested.
    """
    velocity = torch.zeros_like(landscape.parameters())
    for batch in batches:
        before, g = velocity, landscape.batch_gradient(batch)
        velocity = momentum * before - (1 - dampening) * g
        yield Snapshot(landscape.parameters(), g, velocity, lr, momentum, dampening, before)
        with torch.no_grad():
            parts = velocity.split([p.numel() for p in landscape.trainable])
            for p, part in zip(landscape.trainable, parts, strict=True):
                p.add_(part.view_as(p), alpha=lr)


def _mean(samples: list[Tensor]) -> Estimate:
    return estimates.mean(torch.stack(samples))
