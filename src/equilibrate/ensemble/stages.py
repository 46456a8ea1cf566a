"""The links of a network's chain: functions of all replicas at once, and how to differentiate them.

In each, parameters and inputs alike carry the replicas on their first axis, and a replica's outputs
depend on that replica alone. Autograd differentiates a stage; the commonest ones say themselves
how it is done, which is faster and writes gradients right where they are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from equilibrate.ensemble import _ops as kernels
from equilibrate.ensemble._ops import conv_relu_pool, pack_images, why_not_fused
from equilibrate.ensemble._ops.streams import SecondStream
from equilibrate.ensemble.batches import DataSet, Examples
from equilibrate.ensemble.precision import Precision, of_convolutions

Tensors = Mapping[str, Tensor]
Function = Callable[[Tensors, Any], Tensor]
SECOND = SecondStream()


@dataclass(frozen=True)
class Held:
    """What a stage is bound to."""

    tensors: Tensors
    """All its parameters and buffers, by their names in the layer."""
    gradients: Tensors
    """Where the gradients of those that are trained go."""
    through: bool
    """Whether the gradient goes on through its inputs, to stages before it."""


class Stage:
    """A function of (tensors, inputs), differentiated by autograd.

    One that `gathers` takes its inputs out of a data set by itself, as `Examples`.
    """

    def __init__(self, function: Function, held: Held, *, gathers: bool = False) -> None:
        self._function = function
        self._tensors = held.tensors
        self._gradients = held.gradients
        self._leaves = {
            name: held.tensors[name].detach().requires_grad_() for name in held.gradients
        }
        self._through = held.through
        self.gathers = gathers

    @property
    def trains(self) -> bool:
        """Whether it, or a stage before it, has parameters to train."""
        return self._through or bool(self._gradients)

    def prepare(self, images: Tensor) -> DataSet:
        """A data set as it wants to read it, where it is the first stage."""
        return images

    def __call__(self, x: Tensor | Examples) -> Tensor:
        """The outputs alone."""
        return self._function(self._tensors, x)

    def forward(self, x: Tensor | Examples) -> tuple[Tensor, Any]:
        """The outputs, and what `backward` needs."""
        if not self.trains:
            return self(x), None
        with torch.enable_grad():
            if self._through and isinstance(x, Tensor):
                x = x.detach().requires_grad_()
            y = self._function({**self._tensors, **self._leaves}, x)
        return y.detach(), (x, y)

    def backward(self, saved: Any, grad: Tensor) -> Tensor | None:
        """Write the parameters' gradients; return that of the inputs, None where it ends here."""
        if not self.trains:
            return None
        x, y = saved
        wanted = [*self._leaves.values(), *([x] if self._through else [])]
        found = torch.autograd.grad(y, wanted, grad, materialize_grads=True)
        for gradient, value in zip(self._gradients.values(), found, strict=False):
            gradient.copy_(value)
        return found[-1] if self._through else None


class LinearStage(Stage):
    """y = x Wᵀ + b for each replica, or max(y, 0) where a `relu` comes after it.

    `fused`: what is around the products goes through Triton kernels. On a GPU the gradient of the
    weight is left to a second stream, which `SECOND.join` waits for.
    """

    def __init__(self, held: Held, *, relu: bool, fused: bool) -> None:
        super().__init__(lambda _, x: self.forward(x)[0], held)
        # static views: making one takes as long as a small product
        self._weight = held.tensors["weight"]
        self._weight_transposed = held.tensors["weight"].mT
        self._bias = held.tensors["bias"]
        self._bias_row = self._bias.unsqueeze(1)
        self.outputs = self._bias.shape[1]
        self.relu = relu
        self._fused = fused

    def forward(self, x: Tensor | Examples) -> tuple[Tensor, Any]:
        """As `Stage.forward`."""
        assert isinstance(x, Tensor)
        rows = x.flatten(1, -2)
        if self._fused:
            from equilibrate.ensemble._ops import step as fused

            y = torch.bmm(rows, self._weight_transposed)
            fused.add_bias(y, self._bias, relu=self.relu)
        else:
            y = torch.baddbmm(self._bias_row, rows, self._weight_transposed)
            y = y.relu_() if self.relu else y
        return y if x.dim() == 3 else y.unflatten(1, x.shape[1:-1]), (x, y)

    def backward(self, saved: Any, grad: Tensor) -> Tensor | None:
        """∂W = (∂y)ᵀ x, ∂b = Σ ∂y, ∂x = ∂y W; with a ReLU ∂y = 0 first where y = 0."""
        x, y = saved
        grad = grad.flatten(1, -2)
        if self._fused:
            from equilibrate.ensemble._ops import step as fused

            grad = grad.contiguous()
            fused.bias_gradient(grad, y if self.relu else None, self._gradients["bias"])
        else:
            if self.relu:
                grad = torch.ops.aten.threshold_backward(grad, y, 0)
            torch.sum(grad, 1, out=self._gradients["bias"])
        return self._products(x, grad)

    def close(self, x: Tensor | Examples, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """As the last stage before a cross-entropy: losses and ∂x, all gradients written."""
        from equilibrate.ensemble._ops import step as fused

        assert isinstance(x, Tensor)
        y = torch.bmm(x, self._weight_transposed)
        losses, grad = fused.cross_entropy(y, labels, self._bias, self._gradients["bias"])
        return losses, self._products(x, grad)

    def _products(self, x: Tensor, grad: Tensor) -> Tensor | None:
        self._read = x, grad  # kept: the second stream may read them after this has returned
        with SECOND.beside(grad.device):
            torch.bmm(grad.mT, x.flatten(1, -2), out=self._gradients["weight"])
        if not self._through:
            return None
        found = torch.bmm(grad, self._weight)
        return found if x.dim() == 3 else found.view(x.shape)


class ReLUStage(Stage):
    """y = max(x, 0)."""

    def __init__(self, held: Held) -> None:
        super().__init__(lambda _, x: F.relu(x), held)

    def forward(self, x: Tensor | Examples) -> tuple[Tensor, Any]:
        """As `Stage.forward`."""
        y = self(x)
        return y, y

    def backward(self, saved: Any, grad: Tensor) -> Tensor | None:
        """∂x = ∂y where y > 0."""
        return torch.ops.aten.threshold_backward(grad, saved, 0) if self._through else None


def flatten(held: Held) -> Stage:
    """All axes of an example into one."""
    return Stage(lambda _, x: x.flatten(2), held)


class ConvReluPoolStage(Stage):
    """A convolution, ReLU and max-pooling in one, on a GPU (or `fused`) of all replicas at once."""

    def __init__(self, held: Held, *, fused: bool, precision: Precision) -> None:
        at_once = fused or held.tensors["weight"].is_cuda
        super().__init__(self._at_once if at_once else _one_by_one, held, gathers=at_once)
        self._precision: kernels.Precision = of_convolutions(precision)

    def prepare(self, images: Tensor) -> DataSet:
        """Packed once, not at each step."""
        weight, bias = self._tensors["weight"], self._tensors["bias"]
        if not self.gathers or why_not_fused(images, weight, bias) is not None:
            return images
        return pack_images(images.detach(), weight.shape[-1], self._precision)

    def _at_once(self, tensors: Tensors, x: Tensor | Examples) -> Tensor:
        images, index = (x.images, x.index) if isinstance(x, Examples) else (x, None)
        return conv_relu_pool(
            images, tensors["weight"], tensors["bias"], index=index, precision=self._precision
        )


def _one_by_one(tensors: Tensors, x: Tensor) -> Tensor:
    """On a CPU grouped convolutions, and pooling with channels first, take several times longer."""
    replicas = zip(x, tensors["weight"], tensors["bias"], strict=True)
    return torch.stack([_channels_last(*replica) for replica in replicas]).movedim(-1, 2)


def _channels_last(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One replica's convolution, ReLU and pooling, (B, H/2, W/2, C)."""
    x = x.contiguous(memory_format=torch.channels_last)
    y = F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
    return F.max_pool2d(F.relu(y), 2).movedim(1, -1)


def of_module(layer: nn.Module, held: Held) -> Stage:
    """Any module, through `torch.func`."""
    # One name for each place that holds a tensor: a tied one is held in several.
    named = dict((*layer.named_parameters(), *layer.named_buffers()))
    first = {id(tensor): name for name, tensor in named.items()}
    places = {
        f"{path}.{name}" if path else name: first[id(tensor)]
        for path, module in layer.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }

    def one(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        given = {place: tensors[name] for place, name in places.items()}
        return functional_call(layer, given, (x,), tie_weights=False)

    return Stage(lambda tensors, x: vmap(one)(dict(tensors), x), held)
