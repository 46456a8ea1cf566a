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

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.landscape.data import Batch
from equilibrate.landscape.landscape import Landscape, Loss, Progress
from equilibrate.measurements import Measurement, measure_series
from equilibrate.observables import Snapshot, fdr2_left, fdr2_right, successive
from equilibrate.relations import fdr1


@dataclass(frozen=True, slots=True)
class FDR2Estimates:
    """Both sides of FDR2 at one learning rate: (a), (b), (c) the left side, (d) the right side.

    All four estimate (1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩, which is G(η) = ⟨(∇f)²⟩ without momentum. An estimate
    without samples is None.
    """

    lr: float
    """Learning rate η."""
    epoch_ends: Estimate | None
    """(a) Full-batch gradients at the ends of reshuffled epochs."""
    full_batch: Estimate | None
    """(b) Full-batch gradients, independent batches."""
    successive: Estimate | None
    """(c) Successive mini-batch gradients; None with momentum, where their mean is another one."""
    curvature: Estimate | None
    """(d) Hessian products."""
    fdr1: Measurement
    """FDR1 over the same run. If it does not hold, the run was not stationary."""

    def table(self) -> str:
        """Return the estimates as a table, one line for each."""
        rows = [
            ("(a) full batch at epoch ends, reshuffled", self.epoch_ends),
            ("(b) full batch, independent batches", self.full_batch),
            ("(c) successive mini-batches", self.successive),
            ("(d) Hessian products", self.curvature),
        ]
        return "\n".join(
            [
                f"FDR2 at lr {self.lr:g}, 95 % intervals (FDR1 residual {self.fdr1.residual:+.3f})",
                *(
                    f"{name:<42}{e}  ({e.count} samples, {e.method})"
                    for name, e in rows
                    if e is not None
                ),
            ]
        )


def estimate_fdr2(
    model: nn.Module,
    loss: Loss,
    data: Batch,
    *,
    lr: float,
    batch_size: int,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    steps: int = 2000,
    num_full_gradients: int = 40,
    num_hessian_products: int = 400,
    full_gradient_size: int | None = None,
    reshuffled_epochs: int = 0,
    burn_in: int = 100,
    chunk_size: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> FDR2Estimates:
    """Continue training of an equilibrated model and estimate both sides of FDR2.

    A copy of the model is trained. After `burn_in` steps come `steps` steps with independent
    batches, for the estimates (b), (c) and (d), and then the reshuffled epochs, for (a).

    Args:
        model: A deterministic model that has equilibrated at `lr`. It is not changed.
        loss: Maps (outputs, targets) to the mean loss over the examples.
        data: (inputs, targets).
        lr: Learning rate η.
        batch_size: Number of examples in a mini-batch.
        momentum: Momentum μ.
        dampening: Dampening ν.
        weight_decay: λ of the L2 term.
        steps: Number of steps with independent batches.
        num_full_gradients: Number of these steps, chosen at random, with a full-batch gradient.
        num_hessian_products: Number of these steps, chosen at random, with a Hessian product on
            another mini-batch.
        full_gradient_size: If given, two independent batches of this size replace the full batch.
            The product of their gradients has the mean (∇f)².
        reshuffled_epochs: Number of reshuffled epochs. The ends of their second half are used.
        burn_in: Number of steps before the measurement.
        chunk_size: Maximum number of examples in a forward pass over the data.
        seed: Seed of the generator that draws batches and steps.
        progress: Called after each chunk of a pass over the data with its number of examples.

    Returns:
        The four estimates, and FDR1 over the same run.

    Raises:
        ValueError: If an argument is out of range. See also `Landscape`.

    Example:
        >>> data = torch.randn(50, 2), torch.randn(50, 1)
        >>> def half_square(outputs, targets):
        ...     return (outputs - targets).square().mean() / 2
        >>> model = nn.Linear(2, 1)
        >>> found = estimate_fdr2(model, half_square, data, lr=0.1, batch_size=5, steps=400)
        >>> found.full_batch.count, found.successive.count, found.curvature.count
        (40, 399, 400)
    """
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    counts = {
        "num_full_gradients": num_full_gradients,
        "num_hessian_products": num_hessian_products,
    }
    for name, value in counts.items():
        if not 2 <= value <= steps:
            raise ValueError(f"{name} must be between 2 and steps = {steps}, got {value}")
    landscape = Landscape(
        copy.deepcopy(model),
        loss,
        data,
        weight_decay=weight_decay,
        chunk_size=chunk_size,
        seed=seed,
        progress=progress,
    )
    examples, generator = landscape.data, landscape.generator
    run = _Run(landscape, lr, momentum, dampening)
    samples = FDR2Accumulator(lr)
    for _ in run.steps(examples.mini_batches(batch_size, burn_in, generator)):
        pass
    full_gradient_steps = _random_steps(num_full_gradients, steps, generator)
    hessian_steps = _random_steps(num_hessian_products, steps, generator)
    for t, s in enumerate(run.steps(examples.mini_batches(batch_size, steps, generator))):
        samples.update(s)
        if t in full_gradient_steps and full_gradient_size is None:
            samples.full_batch.append(fdr2_left(s, landscape.gradient().to(s.gradient)))
        elif t in full_gradient_steps:
            pair = examples.mini_batches(full_gradient_size, 2, generator)
            samples.full_batch.append(fdr2_left(s, *map(landscape.batch_gradient, pair)))
        if t in hessian_steps:
            [other] = examples.mini_batches(batch_size, 1, generator)
            product = landscape.batch_hessian_product(other, s.velocity_after)
            samples.curvature.append(fdr2_right(s, product))
    epochs = examples.epochs(batch_size, generator)
    # One epoch more, of which only the first step is used: it starts where the last epoch ended.
    for epoch in range(reshuffled_epochs + 1 if reshuffled_epochs else 0):
        for t, s in enumerate(run.steps(next(epochs))):
            if t == 0 and epoch > reshuffled_epochs // 2:
                samples.epoch_ends.append(fdr2_left(s, landscape.gradient().to(s.gradient)))
            if epoch == reshuffled_epochs:
                break
    return samples.result()


class FDR2Accumulator:
    """Collects samples along a run and computes `FDR2Estimates` from them.

    Call `update` at each step with independent batches. Append to `epoch_ends` and `full_batch`
    values of `observables.fdr2_left`, and to `curvature` values of `observables.fdr2_right`, at the
    steps where they are measured.

    Args:
        lr: Learning rate η.

    Example:
        >>> samples = FDR2Accumulator(lr=0.1)
        >>> for g in (1.0, -1.0, 0.5):
        ...     s = Snapshot(torch.ones(1), torch.tensor([g]), lr=0.1)
        ...     samples.update(s)
        ...     samples.curvature.append(fdr2_right(s, hessian_velocity=2 * s.velocity_after))
        >>> found = samples.result()
        >>> round(found.successive.value, 6), round(found.curvature.value, 6), found.full_batch
        (0.75, 0.075, None)
    """

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.epoch_ends: list[Tensor] = []
        self.full_batch: list[Tensor] = []
        self.curvature: list[Tensor] = []
        self._fdr1 = fdr1()
        self._sides: list[Tensor] = []
        self._successive: list[Tensor] = []
        self._previous: Tensor | None = None
        self._momentum = False

    def update(self, s: Snapshot) -> None:
        """Add one step of a run with independent batches.

        Args:
            s: The step.
        """
        sides = self._fdr1.left, self._fdr1.right, self._fdr1.potential
        self._sides.append(torch.stack([side(s) for side in sides if side is not None]))
        if self._previous is not None:
            self._successive.append(successive(self._previous, s))
        self._previous = s.gradient
        self._momentum = self._momentum or bool(s.momentum)

    def result(self) -> FDR2Estimates:
        """Return the estimates for which there are samples.

        Raises:
            ValueError: If there has been no step.
        """
        if not self._sides:
            raise ValueError("there are no steps: call update for each step of the run first")
        return FDR2Estimates(
            self.lr,
            _mean(self.epoch_ends),
            _mean(self.full_batch),
            None if self._momentum else _mean(self._successive),
            _mean(self.curvature),
            measure_series(*torch.stack(self._sides, 1)),
        )


class _Run:
    """SGD on the parameters of the model of a landscape."""

    def __init__(self, landscape: Landscape, lr: float, momentum: float, dampening: float) -> None:
        self._landscape = landscape
        self._settings = lr, momentum, dampening
        self._velocity = torch.zeros_like(landscape.parameters())

    def steps(self, batches: Iterable[Batch]) -> Iterator[Snapshot]:
        """Yield one step for each batch. The model moves when the next step is requested."""
        lr, momentum, dampening = self._settings
        for batch in batches:
            before, g = self._velocity, self._landscape.batch_gradient(batch)
            after = momentum * before - (1 - dampening) * g
            yield Snapshot(self._landscape.parameters(), g, after, lr, momentum, dampening, before)
            self._velocity = after
            self._move(lr * after)

    def _move(self, change: Tensor) -> None:
        trainable = self._landscape.trainable
        parts = change.split([p.numel() for p in trainable])
        with torch.no_grad():
            for p, part in zip(trainable, parts, strict=True):
                p += part.view_as(p)


def _random_steps(count: int, steps: int, generator: torch.Generator) -> set[int]:
    return set(torch.randperm(steps, generator=generator)[:count].tolist())


def _mean(samples: list[Tensor]) -> Estimate | None:
    return estimates.mean(torch.stack(samples)) if samples else None
