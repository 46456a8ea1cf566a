"""What an ensemble does on a GPU between its matrix products, in Triton kernels.

Each does in one pass over memory what plain torch does in several: the gathering of a mini-batch,
bias and ReLU, the gradients of both, the loss with its gradient, the step with its observables.
Their twins in plain torch are in `stages.py`, `network.py`, `updates.py` and `batches.py`. (Only
imported where a GPU is, and in tests: Triton's interpreter runs them on a CPU.)
"""

# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# Kernels are called in Triton's own way, with a grid and plain numbers for constants.

from __future__ import annotations

import torch
from torch import Tensor

from equilibrate.ensemble._ops import _step_kernels as _kernels
from equilibrate.ensemble.updates import SGD, Flat, Rule
from equilibrate.observables import fdr1_coefficient

_BLOCK = 2048
"""Parameters a program of the update handles."""
_ROWS, _COLUMNS = 128, 32
"""Examples and neurons a program of the others handles at once."""


def take(
    order: Tensor,
    counts: Tensor,
    labels: tuple[Tensor, Tensor],
    index: Tensor,
    images: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Replica r's batch number counts[r] of `order` (steps, R, B): its labels, index and images.

    `labels` and `images` are pairs of a data set (N, …) and what is written, (R, B, …).
    """
    data_labels, y = labels
    data_images, x = images or (None, None)
    row = 0 if x is None else x[0, 0].numel()
    label = y[0, 0].numel()
    replicas, size = index.shape
    _kernels.take_kernel[(size, replicas)](
        order, counts, data_images, data_labels, index, x, y, row, label,
        ROW=_power_of_two(max(1, row)), LABEL=_power_of_two(label),
    )  # fmt: skip


def add_bias(y: Tensor, bias: Tensor, *, relu: bool) -> None:
    """Add bias (R, N) to y (R, B, N) in place, then take the ReLU of it."""
    replicas, rows, columns = y.shape
    _kernels.add_bias_kernel[(_blocks(rows, 32), _blocks(columns, _COLUMNS), replicas)](
        y, bias, rows, bias.stride(0), COLUMNS=columns, RELU=relu, B=32, N=_COLUMNS
    )


def bias_gradient(grad: Tensor, y: Tensor | None, into: Tensor) -> None:
    """Set grad (R, B, N) to 0 where y is not positive; its sum over B is the bias gradient (R, N).

    Without a `y` there was no ReLU.
    """
    replicas, rows, columns = grad.shape
    _kernels.bias_gradient_kernel[(_blocks(columns, _COLUMNS), replicas)](
        grad, y, into, rows, into.stride(0),
        COLUMNS=columns, STEPS=_blocks(rows, _ROWS), B=_ROWS, N=_COLUMNS, num_warps=8,
    )  # fmt: skip


def cross_entropy(
    outputs: Tensor, labels: Tensor, bias: Tensor | None = None, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of each replica, (R,) in double precision, and its gradient.

    With a bias (R, C), which is added to the outputs (R, B, C) first, its gradient goes `into`.
    """
    replicas, rows, classes = outputs.shape
    losses = outputs.new_empty(replicas, dtype=torch.float64)
    grad = torch.empty_like(outputs)
    columns = _power_of_two(classes)
    block = max(1, 2048 // columns)
    _kernels.cross_entropy_kernel[(replicas,)](
        outputs, labels.contiguous(), bias, grad, losses, into, rows, classes,
        0 if bias is None else bias.stride(0), 0 if into is None else into.stride(0),
        STEPS=_blocks(rows, block), B=block, C=columns,
    )  # fmt: skip
    return losses, grad


def update(
    flat: Flat, rule: Rule, weight_decay: float, losses: Tensor, rows: Tensor, counts: Tensor
) -> None:
    """`updates.update` of all replicas; replica r's row goes to rows[counts[r], r], and counts on.

    The memory is that of the rule. All flat tensors were made by `updates.zeros`, so that zeros
    lie between their rows. The gradient is left without its L2 term.
    """
    replicas, stride = len(flat.parameters), flat.parameters.stride(0)
    blocks = _blocks(stride, _BLOCK)
    sums = flat.lr.new_empty((replicas, 3, blocks))
    vectors = [t for name, t in flat.memory.items() if name != "powers"]
    first, second, third = [*vectors, *[None] * (3 - len(vectors))]
    powers = flat.memory.get("powers")
    if isinstance(rule, SGD):
        numbers = (rule.momentum, 1 - rule.dampening, 0.0, 0.0)
        coefficient = fdr1_coefficient(1.0, rule.momentum, rule.dampening)
    else:
        numbers = (1 - rule.betas[0], rule.betas[1], 1 - rule.betas[1], rule.epsilon)
        coefficient = 0.5
        rule.advance(flat.memory)
    _kernels.update_kernel[(blocks, replicas)](
        flat.parameters, flat.gradient, first, second, third, powers, flat.lr, sums,
        stride, weight_decay, *numbers, BLOCK=_BLOCK,
    )  # fmt: skip
    _kernels.row_kernel[(replicas,)](
        sums, losses, flat.lr, rows, counts, blocks, coefficient, BLOCK=_power_of_two(blocks)
    )


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
