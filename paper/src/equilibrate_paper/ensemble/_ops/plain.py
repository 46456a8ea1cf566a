"""Operations in plain PyTorch: what runs without Triton, and the reference for its kernels."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibrate.observables import inner
from equilibrate_paper.ensemble._ops.protocol import BatchReader, Updater
from equilibrate_paper.ensemble.examples import IndexedInputs, PreparedInputs
from equilibrate_paper.ensemble.updates import FlatTensors, UpdateRule


class PlainOps:
    """The operations in plain PyTorch. `protocol.Ops` documents each method.

    Args:
        joint_update_size: On a CPU, replicas with more parameters than this are updated one at a
            time, so that each operation finds its operands in the cache.
    """

    order_dtype = torch.int64
    conv_reads_indices = False

    def __init__(self, *, joint_update_size: int = 1 << 14) -> None:
        self._joint_update_size = joint_update_size

    def align(self, parameters: Tensor) -> Tensor:
        return parameters

    def batch_reader(
        self, inputs: PreparedInputs, targets: Tensor, shape: tuple[int, int], *, as_indices: bool
    ) -> BatchReader:
        def read(order: Tensor, counts: Tensor) -> tuple[Tensor | IndexedInputs, Tensor]:
            index = order.index_select(0, counts[:1])[0]
            indexed = IndexedInputs(inputs, index)
            x = indexed if as_indices else indexed.gather()
            return x, IndexedInputs(targets, index).gather()

        return read

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool) -> Tensor:
        y = torch.baddbmm(bias, x, weight)
        return y.relu_() if relu else y

    def bias_gradient(self, grad: Tensor, y: Tensor | None, out: Tensor) -> Tensor:
        if y is not None:
            grad = torch.ops.aten.threshold_backward(grad, y, 0)
        torch.sum(grad, 1, out=out)
        return grad

    def linear_cross_entropy(
        self, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs = self.linear(x, weight, bias, relu=False)
        losses, grad = cross_entropy_and_gradient(outputs, targets)
        return losses, self.bias_gradient(grad, None, out)

    def prepare_images(self, images: Tensor, weight: Tensor) -> PreparedInputs:
        return images

    def conv_relu_pool(self, x: Tensor | IndexedInputs, weight: Tensor, bias: Tensor) -> Tensor:
        return conv_relu_pool(cast(Tensor, x), weight, bias)

    def updater(self, flat: FlatTensors, rule: UpdateRule, weight_decay: float) -> Updater:
        replicas, size = flat.parameters.shape
        joint = flat.parameters.device.type != "cpu" or size <= self._joint_update_size
        parts = [slice(None)] if joint else range(replicas)
        # Made once: on a CPU a view takes as long as a small operation.
        views = [(part, flat.rows(part)) for part in parts]

        def apply(losses: Tensor, rows: Tensor, counts: Tensor) -> None:
            row = torch.empty_like(rows[0])
            for part, tensors in views:
                update(tensors, rule, weight_decay, losses[part], row[part])
            rows.index_copy_(0, counts[:1], row[None])
            counts.add_(1)

        return apply


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy of each replica.

    Args:
        outputs: Unnormalized scores, (R, B, C).
        targets: Class indices, (R, B).

    Returns:
        The losses, (R,).
    """
    return _cross_entropy_and_softmax(outputs, targets)[0]


def cross_entropy_and_gradient(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean cross-entropy of each replica and its gradient.

    Args:
        outputs: Unnormalized scores, (R, B, C).
        targets: Class indices, (R, B).

    Returns:
        The losses, (R,), and their gradient with respect to the outputs, (R, B, C).
    """
    losses, softmax = _cross_entropy_and_softmax(outputs, targets)
    softmax.scatter_(-1, targets.unsqueeze(-1), -1.0, reduce="add")
    return losses, softmax.div_(targets.shape[1])


def _cross_entropy_and_softmax(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    # On a CPU torch's own softmax of a few classes takes more than twice as long.
    partition = outputs.logsumexp(-1, keepdim=True)
    losses = partition - outputs.gather(-1, targets.unsqueeze(-1))
    return losses.mean((1, 2)), (outputs - partition).exp_()


def conv_relu_pool(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute convolution, ReLU and pooling of one replica after the other.

    On a CPU, grouped convolutions, and pooling with channels first, take several times longer.

    Args:
        x: Images, (R, B, C, H, W).
        weight: Filters, (R, O, C, F, F).
        bias: Biases, (R, O).

    Returns:
        Pooled outputs, (R, B, O, H//2, W//2).

    Example:
        >>> x, weight = torch.ones(2, 1, 1, 4, 4), torch.ones(2, 1, 1, 1, 1)
        >>> conv_relu_pool(x, weight, torch.tensor([[1.0], [-3.0]])).flatten(1)
        tensor([[2., 2., 2., 2.],
                [0., 0., 0., 0.]])
    """
    replicas = zip(x, weight, bias, strict=True)
    return torch.stack([_channels_last(*replica) for replica in replicas]).movedim(-1, 2)


def _channels_last(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return convolution, ReLU and pooling of one replica, (B, H/2, W/2, O)."""
    x = x.contiguous(memory_format=torch.channels_last)
    y = F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
    return F.max_pool2d(F.relu(y), 2).movedim(1, -1)


def update(
    flat: FlatTensors, rule: UpdateRule, weight_decay: float, loss: Tensor, row: Tensor
) -> None:
    """Make one step in place and write what it measures into `row`.

    The columns of `row` are both sides of the rule's relation, the loss, and v·g with the velocity
    before the step (zero for a rule without a velocity).

    Args:
        flat: The tensors to read and modify, (…, P). The L2 term is added to the gradient.
        rule: The update rule.
        weight_decay: λ of the L2 term ½λ|θ|².
        loss: The loss of each replica in float64, (…).
        row: Where the measurements are written, in float64, (…, 4).

    Example:
        >>> from equilibrate_paper.ensemble.updates import SGD
        >>> flat = FlatTensors(torch.ones(2), torch.tensor([1.0, 0.0]), torch.tensor(0.5), {})
        >>> row = torch.empty(4, dtype=torch.float64)
        >>> update(flat, SGD(), 0.0, row.new_tensor(3.0), row)
        >>> flat.parameters.tolist(), row.tolist()
        ([0.5, 1.0], [1.0, 0.25, 3.0, 0.0])
    """
    flat.gradient.add_(flat.parameters, alpha=weight_decay)
    before = flat.state.get("momentum_buffer")
    work = torch.zeros_like(loss) if before is None else -inner(before, flat.gradient)
    direction = rule.direction(flat.gradient, flat.state)
    snapshot = rule.snapshot(flat.parameters, flat.gradient, direction, flat.lr)
    left, right = (side(snapshot) for side in rule.sides)
    torch.stack([left, right, loss, work], dim=-1, out=row)
    flat.parameters.addcmul_(direction, flat.lr.to(direction.dtype).unsqueeze(-1), value=-1)
