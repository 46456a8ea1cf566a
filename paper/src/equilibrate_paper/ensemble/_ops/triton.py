"""Operations in Triton kernels, for a GPU.

Each kernel does in one pass over memory what PyTorch does in several: reading a mini-batch, bias
and ReLU, their gradients, the loss with its gradient, the update with its observables. `plain`
holds the same operations in PyTorch. Import this module only where Triton is installed; on a CPU
the kernels run in Triton's interpreter, which the tests use.
"""

# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# Kernels are launched with Triton's own syntax: a grid in brackets, plain numbers for constants.

from __future__ import annotations

import torch
from torch import Tensor

from equilibrate.observables import fdr1_coefficient
from equilibrate_paper.ensemble._ops import conv
from equilibrate_paper.ensemble._ops import step_kernels as kernels
from equilibrate_paper.ensemble._ops.protocol import BatchReader, Updater
from equilibrate_paper.ensemble.examples import IndexedInputs, PreparedInputs
from equilibrate_paper.ensemble.precision import CONV_PRECISION, Precision
from equilibrate_paper.ensemble.updates import SGD, FlatTensors, UpdateRule

_BLOCK = 2048
"""Parameters that one program of the update handles."""
_ROWS, _COLUMNS = 128, 32
"""Examples and neurons that one program of the other kernels handles at once."""


class TritonOps:
    """The operations in Triton kernels. `protocol.Ops` documents each method.

    Args:
        precision: The precision of convolutions.
    """

    order_dtype = torch.int32  # half as much to copy to the GPU
    conv_reads_indices = True

    def __init__(self, precision: Precision) -> None:
        self._conv_precision = CONV_PRECISION[precision]

    def align(self, parameters: Tensor) -> Tensor:
        # Rows that start at multiples of 64 bytes allow wider loads.
        replicas, size = parameters.shape
        return parameters.new_zeros(replicas, -(-size // 16) * 16)[:, :size].copy_(parameters)

    def batch_reader(
        self, inputs: PreparedInputs, targets: Tensor, shape: tuple[int, int], *, as_indices: bool
    ) -> BatchReader:
        targets = targets.contiguous()
        index = torch.zeros(shape, dtype=torch.int64, device=targets.device)
        y = targets.new_empty((*shape, *targets.shape[1:]))
        if as_indices:

            def read(order: Tensor, counts: Tensor) -> tuple[Tensor | IndexedInputs, Tensor]:
                take(order, counts, (targets, y), index)
                return IndexedInputs(inputs, index), y

            return read
        assert isinstance(inputs, Tensor)
        source = inputs.contiguous()
        x = inputs.new_empty((*shape, *inputs.shape[1:]))

        def read_and_copy(order: Tensor, counts: Tensor) -> tuple[Tensor | IndexedInputs, Tensor]:
            take(order, counts, (targets, y), index, (source, x))
            return x, y

        return read_and_copy

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool) -> Tensor:
        y = torch.bmm(x, weight)
        add_bias(y, bias, relu=relu)
        return y

    def bias_gradient(self, grad: Tensor, y: Tensor | None, out: Tensor) -> Tensor:
        grad = grad.contiguous()
        bias_gradient(grad, y, out)
        return grad

    def linear_cross_entropy(
        self, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        return cross_entropy(torch.bmm(x, weight), targets, bias, out)

    def prepare_images(self, images: Tensor, weight: Tensor) -> PreparedInputs:
        return conv.pack_images(images, weight.shape[-1], self._conv_precision)

    def conv_relu_pool(self, x: Tensor | IndexedInputs, weight: Tensor, bias: Tensor) -> Tensor:
        return conv.conv_relu_pool(x, weight, bias, self._conv_precision)

    def updater(self, flat: FlatTensors, rule: UpdateRule, weight_decay: float) -> Updater:
        def apply(losses: Tensor, rows: Tensor, counts: Tensor) -> None:
            update(flat, rule, weight_decay, losses, rows, counts)

        return apply


def take(
    order: Tensor,
    counts: Tensor,
    targets: tuple[Tensor, Tensor],
    index: Tensor,
    inputs: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Read mini-batch order[counts[r], r] of each replica r.

    Args:
        order: Indices of the examples of an epoch, (steps, R, B).
        counts: The number of the mini-batch of each replica, (R,).
        targets: The targets of the data set, (N, …), and where those of the mini-batch are
            written, (R, B, …).
        index: Where the indices of the examples are written, (R, B).
        inputs: The same as `targets` for the inputs, or None to leave the inputs in place.
    """
    data_targets, y = targets
    data_inputs, x = inputs or (None, None)
    input_size = 0 if x is None else x[0, 0].numel()
    target_size = y[0, 0].numel()
    replicas, size = index.shape
    kernels.take_kernel[(size, replicas)](
        order, counts, data_inputs, data_targets, index, x, y, input_size, target_size,
        INPUT=_power_of_two(max(1, input_size)), TARGET=_power_of_two(target_size),
    )  # fmt: skip


def add_bias(y: Tensor, bias: Tensor, *, relu: bool) -> None:
    """Add a bias in place, then apply a ReLU if `relu` is set.

    Args:
        y: Outputs of a product, (R, B, N), contiguous.
        bias: Biases, (R, N) or (R, 1, N).
        relu: Whether to apply a ReLU.
    """
    replicas, rows, columns = y.shape
    kernels.add_bias_kernel[(_blocks(rows, 32), _blocks(columns, _COLUMNS), replicas)](
        y, bias, rows, bias.stride(0), COLUMNS=columns, RELU=relu, B=32, N=_COLUMNS
    )


def bias_gradient(grad: Tensor, y: Tensor | None, out: Tensor) -> None:
    """Set the gradient to zero where the ReLU did, and sum it over the examples.

    Args:
        grad: Gradient of the outputs, (R, B, N), contiguous. It is modified in place.
        y: Outputs of the ReLU, (R, B, N), or None if there was no ReLU.
        out: Where the gradient of the bias is written, (R, N).
    """
    replicas, rows, columns = grad.shape
    kernels.bias_gradient_kernel[(_blocks(columns, _COLUMNS), replicas)](
        grad, y, out, rows, out.stride(0),
        COLUMNS=columns, STEPS=_blocks(rows, _ROWS), B=_ROWS, N=_COLUMNS, num_warps=8,
    )  # fmt: skip


def cross_entropy(
    outputs: Tensor, targets: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the mean cross-entropy of each replica and its gradient.

    Args:
        outputs: Unnormalized scores without their bias, (R, B, C), contiguous.
        targets: Class indices, (R, B).
        bias: A bias to add to the outputs, (R, C) or (R, 1, C).
        out: Where the gradient of the bias is written, (R, C).

    Returns:
        The losses in float64, (R,), and their gradient with respect to the outputs, (R, B, C).
    """
    replicas, rows, classes = outputs.shape
    losses = outputs.new_empty(replicas, dtype=torch.float64)
    grad = torch.empty_like(outputs)
    columns = _power_of_two(classes)
    block = max(1, 2048 // columns)
    kernels.cross_entropy_kernel[(replicas,)](
        outputs, targets.contiguous(), bias, grad, losses, out, rows, classes,
        0 if bias is None else bias.stride(0), 0 if out is None else out.stride(0),
        STEPS=_blocks(rows, block), B=block, C=columns,
    )  # fmt: skip
    return losses, grad


def update(
    flat: FlatTensors,
    rule: UpdateRule,
    weight_decay: float,
    losses: Tensor,
    rows: Tensor,
    counts: Tensor,
) -> None:
    """Make one step of all replicas, as `plain.update` does, and count it.

    The gradient is left without its L2 term. The padding of all flat tensors must be zero, as
    `updates.zeros` makes it, since the kernel runs over the padding too.

    Args:
        flat: The tensors to read and modify, (R, P), all with the same strides.
        rule: The update rule.
        weight_decay: λ of the L2 term ½λ|θ|².
        losses: The loss of each replica in float64, (R,).
        rows: Where measurements are written, in float64, (steps, R, 4): those of replica r go to
            rows[counts[r], r].
        counts: Steps made in this epoch, (R,). One is added to each.
    """
    replicas, stride = len(flat.parameters), flat.parameters.stride(0)
    blocks = _blocks(stride, _BLOCK)
    sums = flat.lr.new_empty((replicas, 3, blocks))
    vectors = [t for name, t in flat.state.items() if name != "powers"]
    first, second, third = [*vectors, *[None] * (3 - len(vectors))]
    powers = flat.state.get("powers")
    if isinstance(rule, SGD):
        numbers = (rule.momentum, 1.0, 0.0, 0.0)
        coefficient = fdr1_coefficient(1.0, rule.momentum, 0.0)
    else:
        numbers = (1 - rule.betas[0], rule.betas[1], 1 - rule.betas[1], rule.epsilon)
        coefficient = 0.5
        rule.advance_powers(flat.state)
    kernels.update_kernel[(blocks, replicas)](
        flat.parameters, flat.gradient, first, second, third, powers, flat.lr, sums,
        stride, weight_decay, *numbers, BLOCK=_BLOCK,
    )  # fmt: skip
    kernels.row_kernel[(replicas,)](
        sums, losses, flat.lr, rows, counts, blocks, coefficient, BLOCK=_power_of_two(blocks)
    )


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
