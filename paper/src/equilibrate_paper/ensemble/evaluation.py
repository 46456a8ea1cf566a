"""Losses and gradients over a whole data set."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from equilibrate.observables import inner
from equilibrate_paper.ensemble.data.chunks import even_chunk_size, in_chunks
from equilibrate_paper.ensemble.data.examples import IndexedInputs, PreparedInputsCache
from equilibrate_paper.ensemble.network import Network
from equilibrate_paper.ensemble.precision import Precision, matrix_products
from equilibrate_paper.ensemble.results import Evaluation
from equilibrate_paper.ensemble.updates import FlatTensors


class Evaluator:
    """Computes losses and gradients of all replicas over whole data sets, in chunks.

    Args:
        network: The network of all replicas, which writes its gradients into `flat`.
        flat: The flat tensors of all replicas.
        prepared: Prepares inputs for the network.
        max_chunk_size: The largest number of examples to process at once by default.
        precision: Precision of products on a GPU.
    """

    def __init__(
        self,
        network: Network,
        flat: FlatTensors,
        prepared: PreparedInputsCache,
        *,
        max_chunk_size: int,
        precision: Precision,
    ) -> None:
        self._network, self._flat, self._prepared = network, flat, prepared
        self._max_chunk_size = max_chunk_size
        self._precision: Precision = precision
        self._device = flat.parameters.device

    def evaluate(
        self, inputs: Tensor, targets: Tensor, chunk_size: int | None, weight_decay: float | None
    ) -> Evaluation:
        """Compute loss and accuracy.

        Args:
            inputs: The inputs, (N, …).
            targets: The targets, (N, …), on the device.
            chunk_size: Examples to process at once.
            weight_decay: λ of the L2 term ½λ|θ|² to add to the loss, or None to leave it out.

        Returns:
            Loss and accuracy of each replica.
        """
        examples, classes = len(inputs), not targets.is_floating_point()
        loss = self._flat.lr.new_zeros(len(self._flat.lr))
        correct = torch.full_like(loss, 0.0 if classes else math.nan)
        with torch.no_grad(), matrix_products(self._precision, self._device):
            for x, y in self._chunks(inputs, targets, chunk_size):
                outputs = self._network.outputs(x)
                loss += y.shape[1] * self._network.losses(outputs, y)
                if classes:
                    correct += (outputs.argmax(-1) == y).sum(1)
            loss /= examples
            if weight_decay is not None:
                loss += weight_decay / 2 * inner(self._flat.parameters, self._flat.parameters)
        return Evaluation(tuple(loss.tolist()), tuple((correct / examples).tolist()))

    def full_gradient(
        self, inputs: Tensor, targets: Tensor, chunk_size: int | None, weight_decay: float
    ) -> Tensor:
        """Compute the gradient of the loss with its L2 term.

        Args:
            inputs: The inputs, (N, …).
            targets: The targets, (N, …), on the device.
            chunk_size: Examples to process at once.
            weight_decay: λ of the L2 term ½λ|θ|².

        Returns:
            The gradient of each replica, (R, P).
        """
        total = self._flat.parameters * weight_decay
        with torch.no_grad(), matrix_products(self._precision, self._device):
            for x, y in self._chunks(inputs, targets, chunk_size):
                self._network.differentiate(x, y)
                total.add_(self._flat.gradient, alpha=y.shape[1] / len(inputs))
        return total

    def _chunks(
        self, inputs: Tensor, targets: Tensor, size: int | None
    ) -> Iterator[tuple[Tensor | IndexedInputs, Tensor]]:
        if size is None:
            size = self._max_chunk_size
            if self._device.type != "cpu":
                size = even_chunk_size(len(inputs), size)
        if size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {size}")
        return in_chunks(
            self._prepared.get(inputs),
            targets,
            size,
            len(self._flat.lr),
            as_indices=self._network.reads_indices,
        )
