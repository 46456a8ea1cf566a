"""Some replicas of an ensemble that step together: views of its tensors, and the step itself.

On a CPU an ensemble of big networks is stepped one replica at a time, so that what a step reads
and writes stays in the cache; small ones, and all on a GPU, are stepped together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibrate.ensemble.network import Network
from equilibrate.ensemble.updates import Rule
from equilibrate.observables import inner

COLUMNS = ("left", "right", "loss", "velocity_gradient")


@dataclass(frozen=True)
class Block:
    """Static tensors of g replicas. Flat ones are (g, P), or (P,) where g = 1, for BLAS's sake."""

    replicas: slice
    """Which of the ensemble's replicas these are."""
    network: Network
    rule: Rule
    weight_decay: float
    parameters: Tensor
    gradient: Tensor
    """What the network writes; it belongs to all blocks in turn."""
    memory: Mapping[str, Tensor]
    lr: Tensor

    @property
    def size(self) -> int:
        """Number of replicas, g."""
        return self.replicas.stop - self.replicas.start

    @torch.no_grad()
    def step(self, images: Tensor, labels: Tensor, batch: Tensor, row: Tensor) -> None:
        """One step on the examples `batch` (g, B); what it measures goes into `row` (g, columns).

        No number leaves the device, and every tensor is written in place.
        """
        x, y = (data.index_select(0, batch.flatten()) for data in (images, labels))
        x, y = x.unflatten(0, batch.shape), y.unflatten(0, batch.shape)
        loss = self.network.differentiate(x, y)
        self.update(loss, row if self.size > 1 else row[0])

    def update(self, loss: Tensor, row: Tensor) -> None:
        """θ′ = θ + ηv′ from the gradient of the loss, which has no L2 term yet."""
        self.gradient.add_(self.parameters, alpha=self.weight_decay)
        before = self.memory.get("velocity")
        work = torch.zeros_like(self.lr) if before is None else inner(before, self.gradient)
        velocity = self.rule.direction(self.gradient, self.memory)
        snapshot = self.rule.snapshot(self.parameters, self.gradient, velocity, self.lr)
        left, right = (side(snapshot) for side in self.rule.sides)
        torch.stack([left, right, loss.double().view_as(left), work], dim=-1, out=row)
        self.parameters.addcmul_(velocity, self.lr.to(velocity.dtype).unsqueeze(-1))
