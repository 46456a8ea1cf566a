"""The paper's networks with the parameters of R replicas: losses and gradients of all at once.

The outputs of a replica depend on that replica alone. Gradients are written directly where they are
needed: linear layers compute them explicitly, which is faster than autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from equilibrate_paper.ensemble._ops import Ops
from equilibrate_paper.ensemble._ops.side_stream import SideStream
from equilibrate_paper.ensemble.examples import IndexedInputs, PreparedInputs

Tensors = Mapping[str, Tensor]
_SIDE_STREAM = SideStream()
"""Where the weight gradients of linear layers are computed on a GPU."""


class Network:
    """A chain of convolutions and linear layers with the cross-entropy of its outputs.

    Args:
        model: One replica: convolutions, each with a ReLU and a 2×2 max-pooling, then `nn.Flatten`
            and linear layers with ReLUs between them.
        parameters: Parameters of all replicas by name, (R, …).
        gradients: Where `differentiate` writes the gradients, (R, …).
        ops: The operations to use.

    Raises:
        ValueError: If the model has other layers.

    Example:
        >>> from equilibrate_paper.ensemble._ops.plain import PlainOps
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(2, 4))
        >>> parameters = {"1.weight": torch.zeros(3, 4, 2), "1.bias": torch.zeros(3, 4)}
        >>> gradients = {name: torch.empty_like(p) for name, p in parameters.items()}
        >>> network = Network(model, parameters, gradients, ops=PlainOps())
        >>> network.differentiate(torch.ones(3, 5, 2), torch.ones(3, 5, dtype=torch.int64)).exp()
        tensor([4., 4., 4.])
        >>> gradients["1.bias"][0]
        tensor([ 0.2500, -0.7500,  0.2500,  0.2500])
    """

    def __init__(
        self, model: nn.Sequential, parameters: Tensors, gradients: Tensors, *, ops: Ops
    ) -> None:
        _check_layers(model)
        own = [(n, m) for n, m in model.named_children() if isinstance(m, nn.Conv2d | nn.Linear)]
        self._ops = ops
        self._convolutions: list[_Convolution] = []
        self._linears: list[_Linear] = []
        for number, (name, layer) in enumerate(own):
            first, last = number == 0, number == len(own) - 1
            tensors = [
                t[f"{name}.{n}"] for t in (parameters, gradients) for n in ("weight", "bias")
            ]
            if isinstance(layer, nn.Conv2d):
                self._convolutions.append(_Convolution(*tensors, ops=ops, first=first))
            else:
                self._linears.append(_Linear(*tensors, ops=ops, first=first, relu=not last))

    @property
    def reads_indices(self) -> bool:
        """Whether the inputs are `IndexedInputs`."""
        return bool(self._convolutions) and self._ops.conv_reads_indices

    def prepare(self, inputs: Tensor) -> PreparedInputs:
        """Prepare a data set for the first layer, once instead of at each step.

        Args:
            inputs: The inputs of the data set, (N, …).

        Returns:
            The inputs in the form that the first layer reads.
        """
        if not self._convolutions:
            return inputs
        return self._ops.prepare_images(inputs, self._convolutions[0].weight)

    def outputs(self, x: Tensor | IndexedInputs) -> Tensor:
        """Compute the outputs.

        Args:
            x: Inputs, (R, B, …).

        Returns:
            Outputs, (R, B, C).
        """
        for convolution in self._convolutions:
            x = convolution(x)
        y = cast(Tensor, x).flatten(2)
        for linear in self._linears:
            y = linear(y)
        return y

    def differentiate(self, x: Tensor | IndexedInputs, targets: Tensor) -> Tensor:
        """Compute the loss of each replica and write its gradient.

        Args:
            x: Inputs, (R, B, …).
            targets: Class indices, (R, B).

        Returns:
            The losses, (R,).
        """
        images = []
        for convolution in self._convolutions:
            saved = convolution.forward(x)
            images.append(saved)
            x = saved[1].detach()
        pooled = cast(Tensor, x)
        *hidden, last = self._linears
        inputs = [pooled.flatten(2)]
        for linear in hidden:
            inputs.append(linear(inputs[-1]))
        losses, grad = last.differentiate_cross_entropy(inputs[-1], targets)
        for linear, own, y in zip(hidden[::-1], inputs[-2::-1], inputs[:0:-1], strict=True):
            grad = linear.backward(own, y, cast(Tensor, grad))
        if images:
            grad = cast(Tensor, grad).view(pooled.shape)
        for convolution, (own, y) in zip(self._convolutions[::-1], images[::-1], strict=True):
            grad = convolution.backward(own, y, cast(Tensor, grad))
        _SIDE_STREAM.join(losses.device)
        return losses


class _Convolution:
    """Convolution, ReLU and 2×2 max-pooling, differentiated by autograd."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        weight_gradient: Tensor,
        bias_gradient: Tensor,
        *,
        ops: Ops,
        first: bool,
    ) -> None:
        self.weight, self._bias = weight, bias
        self._leaves = [tensor.detach().requires_grad_() for tensor in (weight, bias)]
        self._gradients = weight_gradient, bias_gradient
        self._ops, self._first = ops, first

    def __call__(self, x: Tensor | IndexedInputs) -> Tensor:
        return self._ops.conv_relu_pool(x, self.weight, self._bias)

    def forward(self, x: Tensor | IndexedInputs) -> tuple[Tensor | IndexedInputs, Tensor]:
        """Return the inputs and the outputs for `backward`."""
        with torch.enable_grad():
            if not self._first and isinstance(x, Tensor):
                x = x.detach().requires_grad_()
            return x, self._ops.conv_relu_pool(x, *self._leaves)

    def backward(self, x: Tensor | IndexedInputs, y: Tensor, grad: Tensor) -> Tensor | None:
        """Return the gradient of the inputs, if a layer needs it, and write the others."""
        inputs = [x] if isinstance(x, Tensor) and not self._first else []
        found = torch.autograd.grad(y, [*self._leaves, *inputs], grad)
        for gradient, value in zip(self._gradients, found, strict=False):
            gradient.copy_(value)
        return found[2] if inputs else None


class _Linear:
    """y = x Wᵀ + b for each replica, or max(y, 0) with a ReLU.

    On a GPU the gradient of the weight is computed on `_SIDE_STREAM`, which must be joined before
    it is used.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        weight_gradient: Tensor,
        bias_gradient: Tensor,
        *,
        ops: Ops,
        first: bool,
        relu: bool,
    ) -> None:
        # Made once: on a CPU a view takes as long as a small product.
        self._weight, self._transposed, self._bias = weight, weight.mT, bias.unsqueeze(1)
        self._weight_gradient, self._bias_gradient = weight_gradient, bias_gradient
        self._ops, self._first, self._relu = ops, first, relu

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._transposed, self._bias, relu=self._relu)

    def backward(self, x: Tensor, y: Tensor, grad: Tensor) -> Tensor | None:
        """Return ∂x = ∂y W, and write ∂W = (∂y)ᵀ x and ∂b = Σ ∂y; ∂y is 0 where the ReLU was."""
        return self._products(x, self._ops.bias_gradient(grad, y, self._bias_gradient))

    def differentiate_cross_entropy(
        self, x: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the cross-entropy of the outputs, and the gradient of the inputs."""
        losses, grad = self._ops.linear_cross_entropy(
            x, self._transposed, self._bias, targets, self._bias_gradient
        )
        return losses, self._products(x, grad)

    def _products(self, x: Tensor, grad: Tensor) -> Tensor | None:
        # Kept alive: the side stream may read them after this function has returned.
        self._read = x, grad
        with _SIDE_STREAM.use(grad.device):
            torch.bmm(grad.mT, x, out=self._weight_gradient)
        return None if self._first else torch.bmm(grad, self._weight)


def _check_layers(model: nn.Sequential) -> None:
    kinds = [type(layer) for layer in model]
    flat = kinds.index(nn.Flatten) if nn.Flatten in kinds else 0
    convolutions = flat // 3 * [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    linears = (len(kinds) - flat) // 2 * [nn.Linear, nn.ReLU]
    known = kinds == [*convolutions, nn.Flatten, *linears[:-1]]
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            same = tuple(width // 2 for width in layer.kernel_size)
            known &= layer.padding == same and layer.stride == (1, 1) and layer.bias is not None
        if isinstance(layer, nn.MaxPool2d):
            known &= layer.kernel_size == 2
    if not known:
        raise ValueError(
            "an ensemble trains convolutions of stride 1 and unchanged size, each with a ReLU and "
            f"a 2×2 max-pooling, then linear layers with ReLUs between them, got {model}"
        )
