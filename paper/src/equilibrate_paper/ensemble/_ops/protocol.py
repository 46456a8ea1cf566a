"""The interface of the operations that an ensemble runs between its matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from equilibrate_paper.ensemble.examples import IndexedInputs, PreparedInputs
from equilibrate_paper.ensemble.updates import FlatTensors, UpdateRule

BatchReader = Callable[[Tensor, Tensor], tuple[Tensor | IndexedInputs, Tensor]]
"""Maps (order, counts) to the inputs and targets of the current mini-batch of each replica."""
Updater = Callable[[Tensor, Tensor, Tensor], None]
"""Makes one step of every replica, given (losses, rows, counts)."""


class Ops(Protocol):
    """Operations on R replicas at once.

    There are two implementations, `plain.PlainOps` and `triton.TritonOps`. They agree up to
    rounding, and the tests compare them. Everything that is called in a training step works on
    static tensors and never waits for the device, so that steps can be captured in a CUDA graph.
    """

    @property
    def order_dtype(self) -> torch.dtype:
        """Data type of the example indices of an epoch."""
        ...

    @property
    def conv_reads_indices(self) -> bool:
        """Whether `conv_relu_pool` takes `IndexedInputs`."""
        ...

    def align(self, parameters: Tensor) -> Tensor:
        """Lay out flat parameters for `updater`.

        Args:
            parameters: Flat parameters, (R, P).

        Returns:
            The same parameters, perhaps a copy with padded rows.
        """
        ...

    def batch_reader(
        self, inputs: PreparedInputs, targets: Tensor, shape: tuple[int, int], *, as_indices: bool
    ) -> BatchReader:
        """Make the function that reads the mini-batches of a data set.

        Args:
            inputs: The prepared inputs of the data set, (N, …).
            targets: The targets of the data set, (N, …).
            shape: Replicas and examples in a mini-batch, (R, B).
            as_indices: Return the inputs as indices into `inputs`.

        Returns:
            A function of `order` (steps, R, B) and `counts` (R,), which reads mini-batch
            order[counts[r], r] of each replica r.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool) -> Tensor:
        """Compute x W + b, and the ReLU of it if `relu` is set.

        Args:
            x: Inputs, (R, B, M).
            weight: Transposed weights, (R, M, N).
            bias: Biases, (R, 1, N).
            relu: Whether to apply a ReLU.

        Returns:
            Outputs, (R, B, N).
        """
        ...

    def bias_gradient(self, grad: Tensor, y: Tensor | None, out: Tensor) -> Tensor:
        """Differentiate bias and ReLU of a linear layer.

        Args:
            grad: Gradient of the outputs, (R, B, N). It may be modified.
            y: Outputs of the ReLU, (R, B, N), or None if there was no ReLU.
            out: Where the gradient of the bias is written, (R, N).

        Returns:
            The gradient before the ReLU, (R, B, N).
        """
        ...

    def linear_cross_entropy(
        self, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the mean cross-entropy of x W + b, and differentiate it.

        Args:
            x: Inputs, (R, B, M).
            weight: Transposed weights, (R, M, C).
            bias: Biases, (R, 1, C).
            targets: Class indices, (R, B).
            out: Where the gradient of the bias is written, (R, C).

        Returns:
            The loss of each replica, (R,), and the gradient with respect to x W + b, (R, B, C).
        """
        ...

    def prepare_images(self, images: Tensor, weight: Tensor) -> PreparedInputs:
        """Lay out a data set once for a first layer that is a `conv_relu_pool`.

        Args:
            images: The images of the data set, (N, C, H, W).
            weight: The filters of the layer, (R, O, C, F, F).

        Returns:
            The images in the form that `conv_relu_pool` reads fastest.
        """
        ...

    def conv_relu_pool(self, x: Tensor | IndexedInputs, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute max_pool2d(relu(conv2d(x[r], weight[r], bias[r], padding="same")), 2) for all r.

        Args:
            x: Images, (R, B, C, H, W), or indices into a data set if `conv_reads_indices`.
            weight: Filters, (R, O, C, F, F).
            bias: Biases, (R, O).

        Returns:
            Pooled outputs, (R, B, O, H//2, W//2), differentiable with respect to all tensors.
        """
        ...

    def updater(self, flat: FlatTensors, rule: UpdateRule, weight_decay: float) -> Updater:
        """Make the function that applies one step of an update rule.

        Args:
            flat: The tensors to read and modify. Parameters must come from `align`, the others
                from `updates.zeros`.
            rule: The update rule.
            weight_decay: λ of the L2 term ½λ|θ|².

        Returns:
            A function of `losses` (R,), `rows` (steps, R, 4) and `counts` (R,), all but the last in
            float64. It makes the step, writes both sides of the rule's relation, the loss and v·g
            of replica r into rows[counts[r], r], and adds one to `counts`. v is the velocity before
            the step, and v·g is zero for a rule without a velocity.
        """
        ...
