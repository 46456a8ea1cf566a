"""FDR2 read in four ways at one learning rate, each with an error bar.

(a) the paper's: full-batch gradients at the ends of reshuffled epochs;
(b) full-batch gradients at random steps of a run with independent batches;
(c) −⟨g_t·g_{t+1}⟩ of that run: no full-batch pass, one stored gradient, no momentum;
(d) the right side: (η/2)⟨v′ᵀHv′⟩ by Hessian products along the steps, (η/2)⟨Tr(HC̃)⟩ at μ = 0.

(a) is biased low. The noise of a reshuffled epoch sums to zero, which takes variance from every
mode slower than an epoch. That is a property of the stationary state and not of the moment at which
it is read, so a full-batch gradient in mid-epoch is biased too; only independent batches are free
of it, and (d), which needs the size of the noise alone, hardly feels it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibrate import estimates
from equilibrate.estimates import Estimate
from equilibrate.landscape.examples import Batch
from equilibrate.landscape.surface import Landscape, Loss, Progress
from equilibrate.observables import Snapshot, fdr2_left, fdr2_right, successive
from equilibrate.relations import Measurement, fdr1, measurement


@dataclass(frozen=True, slots=True)
class SecondRelation:
    """The two sides of FDR2 at one learning rate: (a), (b), (c) are its left side, (d) its right.

    All four are (1−ν)⟨(∇f)²⟩ − μ⟨v·∇f⟩, which is G(η) = ⟨(∇f)²⟩ without momentum; a reading for
    which no sample was taken is None.
    """

    lr: float
    epoch_ends: Estimate | None
    """(a) the paper's."""
    full_batch: Estimate | None
    """(b) full-batch gradients, independent batches."""
    successive: Estimate | None
    """(c) successive mini-batch gradients; None with momentum, where it says something else."""
    curvature: Estimate | None
    """(d) Hessian products."""
    first: Measurement
    """FDR1 over the same run: where it fails, the readings are not of a stationary state."""

    def table(self) -> str:
        """The four readings as lines of text."""
        rows = [
            ("(a) full batch at epoch ends, reshuffled", self.epoch_ends),
            ("(b) full batch, independent batches", self.full_batch),
            ("(c) successive mini-batches", self.successive),
            ("(d) Hessian products", self.curvature),
        ]
        return "\n".join(
            [
                f"FDR2 at lr {self.lr:g}, 95 % intervals (FDR1 residual "
                f"{self.first.residual:+.3f})",
                *(
                    f"{name:<42}{e}  ({e.count} samples, {e.method})"
                    for name, e in rows
                    if e is not None
                ),
            ]
        )


def read_second_relation(
    model: nn.Module,
    loss: Loss,
    data: Batch,
    *,
    lr: float,
    batch: int,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    steps: int = 2000,
    full_batches: int = 40,
    curvatures: int = 400,
    full_size: int | None = None,
    epochs: int = 0,
    burn_in: int = 100,
    chunk: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> SecondRelation:
    """Go on training a copy of `model`, which has equilibrated at `lr`, and read FDR2 on the way.

    After `burn_in` steps come `steps` steps with independent batches: a full-batch gradient at
    `full_batches` of them and a Hessian product, on a further mini-batch, at `curvatures` of them,
    both at random. Where a pass over all the data is too dear, `full_size` examples, drawn twice
    independently of each other, stand for the full batch: their gradients' product has the mean
    (∇f)². Then `epochs` reshuffled epochs, of which the paper's reading takes the full-batch
    gradients at the ends of the later half. `model` itself is not changed.

    >>> data = torch.randn(50, 2), torch.randn(50, 1)
    >>> def half_square(outputs, targets):
    ...     return (outputs - targets).square().mean() / 2
    >>> found = read_second_relation(nn.Linear(2, 1), half_square, data, lr=0.1, batch=5, steps=400)
    >>> found.full_batch.count, found.successive.count, found.curvature.count
    (40, 399, 400)
    """
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    for name, value in {"full_batches": full_batches, "curvatures": curvatures}.items():
        if not 2 <= value <= steps:
            raise ValueError(f"{name} must be between 2 and steps = {steps}, got {value}")
    land = Landscape(
        copy.deepcopy(model),
        loss,
        data,
        weight_decay=weight_decay,
        chunk=chunk,
        seed=seed,
        progress=progress,
    )
    run = _Run(land, lr, momentum, dampening)
    readings = Readings(lr)
    for _ in run.steps(land.examples.mini_batches(batch, burn_in, land.generator)):
        pass
    full_at = _chosen(full_batches, steps, land.generator)
    curved_at = _chosen(curvatures, steps, land.generator)
    for t, s in enumerate(run.steps(land.examples.mini_batches(batch, steps, land.generator))):
        readings.step(s)
        if t in full_at and full_size is None:
            readings.full_batch.append(fdr2_left(s, land.gradient().to(s.gradient)))
        elif t in full_at:
            pair = land.examples.mini_batches(full_size, 2, land.generator)
            readings.full_batch.append(fdr2_left(s, *map(land.batch_gradient, pair)))
        if t in curved_at:
            [other] = land.examples.mini_batches(batch, 1, land.generator)
            bent = land.batch_hessian_product(other, s.velocity_after)
            readings.curvature.append(fdr2_right(s, bent))
    shuffled = land.examples.epochs(batch, land.generator)
    for epoch in range(epochs + 1 if epochs else 0):
        for t, s in enumerate(run.steps(next(shuffled))):
            if t == 0 and epoch > epochs // 2:  # where the epoch before it ended
                readings.epoch_ends.append(fdr2_left(s, land.gradient().to(s.gradient)))
            if epoch == epochs:
                break
    return readings.result()


class Readings:
    """Gathers the samples of the four readings along a run, and says what they amount to.

    Every step goes through `step`; what costs more is appended where it was measured, as
    `observables.fdr2_left` and `fdr2_right` have it.
    """

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.epoch_ends: list[Tensor] = []
        self.full_batch: list[Tensor] = []
        self.curvature: list[Tensor] = []
        self._first = fdr1()
        self._sides: list[Tensor] = []
        self._successive: list[Tensor] = []
        self._previous: Tensor | None = None
        self._momentum = False

    def step(self, s: Snapshot) -> None:
        """Take one step of the run with independent batches in."""
        sides = self._first.left, self._first.right, self._first.potential
        self._sides.append(torch.stack([side(s) for side in sides if side is not None]))
        if self._previous is not None:
            self._successive.append(successive(self._previous, s))
        self._previous = s.gradient
        self._momentum = self._momentum or bool(s.momentum)

    def result(self) -> SecondRelation:
        """The four readings, as far as they were taken."""
        if not self._sides:
            raise ValueError("no step was taken in: call step for each step of the run first")
        first = measurement(*torch.stack(self._sides, 1))
        return SecondRelation(
            self.lr,
            _mean(self.epoch_ends),
            _mean(self.full_batch),
            None if self._momentum else _mean(self._successive),
            _mean(self.curvature),
            first,
        )


class _Run:
    """SGD on the parameters of a landscape's model."""

    def __init__(self, land: Landscape, lr: float, momentum: float, dampening: float) -> None:
        self._land = land
        self._settings = lr, momentum, dampening
        self._velocity = torch.zeros_like(land.parameters())

    def steps(self, batches: Iterable[Batch]) -> Iterator[Snapshot]:
        """One step for each batch; the model stands at θ while a snapshot is looked at."""
        lr, momentum, dampening = self._settings
        for batch in batches:
            before, g = self._velocity, self._land.batch_gradient(batch)
            after = momentum * before - (1 - dampening) * g
            yield Snapshot(self._land.parameters(), g, after, lr, momentum, dampening, before)
            self._velocity = after
            self._move(lr * after)

    def _move(self, change: Tensor) -> None:
        trainable = self._land.trainable
        with torch.no_grad():
            for p, part in zip(
                trainable, change.split([p.numel() for p in trainable]), strict=True
            ):
                p += part.view_as(p)


def _chosen(count: int, steps: int, generator: torch.Generator) -> set[int]:
    return set(torch.randperm(steps, generator=generator)[:count].tolist())


def _mean(samples: list[Tensor]) -> Estimate | None:
    return estimates.mean(torch.stack(samples)) if samples else None
