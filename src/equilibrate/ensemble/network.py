"""One network with the parameters of several replicas: outputs, losses and gradients of all.

A network is a chain of stages, each a function of (tensors, inputs) in which parameters and inputs
alike carry the replicas on their first axis; a replica's outputs depend on that replica alone.
Autograd differentiates a stage. The commonest ones say themselves how it is done, which is faster
and writes gradients right where they are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

Tensors = Mapping[str, Tensor]
Function = Callable[[Tensors, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Stage:
    """A function of (tensors, inputs) and the parameters it trains, differentiated by autograd."""

    def __init__(self, function: Function, trained: Sequence[str] = ()) -> None:
        self.function = function
        self.trained = tuple(trained)

    def forward(self, tensors: Tensors, x: Tensor, through: bool) -> tuple[Tensor, Any]:
        """Outputs, and what `backward` needs; `through`: the inputs have a gradient too."""
        with torch.enable_grad():
            x = x.detach().requires_grad_(through)
            leaves = {name: tensors[name].detach().requires_grad_() for name in self.trained}
            y = self.function({**tensors, **leaves}, x)
        return y.detach(), (x, leaves, y)

    def backward(
        self, tensors: Tensors, gradients: Tensors, saved: Any, grad: Tensor, through: bool
    ) -> Tensor | None:
        """Write the parameters' gradients; return the inputs' one if it goes on `through` them."""
        x, leaves, y = saved
        wanted = [*leaves.values(), x] if through else list(leaves.values())
        if not wanted:
            return None
        found = torch.autograd.grad(y, wanted, grad)
        for name, gradient in zip(leaves, found, strict=False):
            gradients[name].copy_(gradient)
        return found[-1] if through else None


class LinearStage(Stage):
    """y = x Wᵀ + b for each replica."""

    def __init__(self, prefix: str) -> None:
        self._weight, self._bias = f"{prefix}weight", f"{prefix}bias"
        super().__init__(self._linear, [self._weight, self._bias])

    def _linear(self, tensors: Tensors, x: Tensor) -> Tensor:
        bias = tensors[self._bias].unsqueeze(1)
        y = torch.baddbmm(bias, x.flatten(1, -2), tensors[self._weight].mT)
        return y.unflatten(1, x.shape[1:-1])

    def forward(self, tensors: Tensors, x: Tensor, through: bool) -> tuple[Tensor, Any]:
        """As `Stage.forward`."""
        return self._linear(tensors, x), x

    def backward(
        self, tensors: Tensors, gradients: Tensors, saved: Any, grad: Tensor, through: bool
    ) -> Tensor | None:
        """∂W = (∂y)ᵀ x, ∂b = Σ ∂y, ∂x = ∂y W."""
        grad = grad.flatten(1, -2)
        torch.bmm(grad.mT, saved.flatten(1, -2), out=gradients[self._weight])
        torch.sum(grad, 1, out=gradients[self._bias])
        return torch.bmm(grad, tensors[self._weight]).view(saved.shape) if through else None


class ReLUStage(Stage):
    """y = max(x, 0)."""

    def __init__(self) -> None:
        super().__init__(lambda _, x: F.relu(x))

    def forward(self, tensors: Tensors, x: Tensor, through: bool) -> tuple[Tensor, Any]:
        """As `Stage.forward`."""
        y = F.relu(x)
        return y, y

    def backward(
        self, tensors: Tensors, gradients: Tensors, saved: Any, grad: Tensor, through: bool
    ) -> Tensor | None:
        """∂x = ∂y where y > 0."""
        return torch.ops.aten.threshold_backward(grad, saved, 0) if through else None


class Network:
    """A chain of stages and a loss.

    >>> network = Network(nn.Linear(2, 1), F.mse_loss)
    >>> tensors = {"weight": torch.ones(3, 1, 2), "bias": torch.zeros(3, 1)}  # three replicas
    >>> network.outputs(tensors, torch.ones(3, 5, 2)).shape
    torch.Size([3, 5, 1])
    """

    def __init__(self, model: nn.Module, loss: Loss, *, explicit: bool = True) -> None:
        self.stages = _chain(model) if explicit else [_vmapped("", model)]
        self.loss = loss

    def outputs(self, tensors: Tensors, x: Tensor) -> Tensor:
        """Outputs (g, B, …) for inputs (g, B, …)."""
        for stage in self.stages:
            x = stage.function(tensors, x)
        return x

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each replica, (g,)."""
        if self._is_classification(outputs, labels):
            each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
            return each.view(labels.shape).mean(1)
        return vmap(self.loss)(outputs, labels)

    def differentiate(
        self, tensors: Tensors, gradients: Tensors, x: Tensor, labels: Tensor
    ) -> Tensor:
        """The loss of each replica; its gradient is written into `gradients`."""
        trace = []
        through = False  # nothing asks for the gradient of the images
        for stage in self.stages:
            x, saved = stage.forward(tensors, x, through)
            trace.append((stage, saved, through))
            through = through or bool(stage.trained)
        losses, grad = self._losses_and_gradient(x, labels)
        for stage, saved, through in reversed(trace):
            if grad is not None:
                grad = stage.backward(tensors, gradients, saved, grad, through)
        return losses

    def _losses_and_gradient(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._is_classification(outputs, labels):
            logs = outputs.log_softmax(-1)
            picked = labels.unsqueeze(-1)
            losses = -logs.gather(-1, picked).squeeze(-1).mean(1)
            off = torch.full((), -1.0, device=logs.device).expand(picked.shape)
            return losses, logs.exp_().scatter_add_(-1, picked, off).div_(labels.shape[1])
        with torch.enable_grad():
            outputs = outputs.detach().requires_grad_()
            losses = self.losses(outputs, labels)
            # the sum over replicas has each replica's gradient in its own place
            return losses.detach(), torch.autograd.grad(losses.sum(), outputs)[0]

    def _is_classification(self, outputs: Tensor, labels: Tensor) -> bool:
        return self.loss is F.cross_entropy and outputs.dim() == 3 and labels.dim() == 2


def _chain(model: nn.Module) -> list[Stage]:
    """The stages of a Sequential, layer by layer; of anything else one for the whole."""
    layers = list(_layers("", model))
    owned = [id(p) for _, layer in layers for p in layer.parameters()]
    if len(set(owned)) < len(owned):  # a parameter used twice has the gradient of both uses
        return [_vmapped("", model)]
    return [_stage(prefix, layer) for prefix, layer in layers]


def _layers(prefix: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers with what stands before the names of their parameters."""
    if type(model) is not nn.Sequential or _hooked(model):
        yield prefix, model
        return
    for name, layer in model._modules.items():  # named_children leaves out what comes again
        assert layer is not None
        yield from _layers(f"{prefix}{name}.", layer)


def _hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _stage(prefix: str, layer: nn.Module) -> Stage:
    # exact types: a subclass may do something else
    kind = type(layer)
    trained = all(p.requires_grad for p in layer.parameters())
    if _hooked(layer) or not trained:
        return _vmapped(prefix, layer)
    if isinstance(layer, nn.Linear) and kind is nn.Linear and layer.bias is not None:
        return LinearStage(prefix)
    if kind is nn.ReLU:
        return ReLUStage()
    if isinstance(layer, nn.Conv2d) and kind is nn.Conv2d:
        return _convolution(prefix, layer)
    if isinstance(layer, nn.MaxPool2d) and kind is nn.MaxPool2d:
        return Stage(lambda _, x: layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]))
    if kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return Stage(lambda _, x: x.flatten(2))
    return _vmapped(prefix, layer)


def _vmapped(prefix: str, layer: nn.Module) -> Stage:
    """Any module, by `torch.func`."""
    own = [n for n, _ in layer.named_parameters()] + [n for n, _ in layer.named_buffers()]

    def one(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, tensors, (x,))

    def function(tensors: Tensors, x: Tensor) -> Tensor:
        return vmap(one)({n: tensors[prefix + n] for n in own}, x)

    trained = [prefix + n for n, p in layer.named_parameters() if p.requires_grad]
    return Stage(function, trained)


def _convolution(prefix: str, layer: nn.Conv2d) -> Stage:
    """A convolution in which the replicas are groups of channels."""
    if layer.groups != 1 or layer.padding_mode != "zeros" or layer.bias is None:
        return _vmapped(prefix, layer)
    weight_name, bias_name = f"{prefix}weight", f"{prefix}bias"

    def function(tensors: Tensors, x: Tensor) -> Tensor:
        weight = tensors[weight_name]
        y = F.conv2d(
            x.transpose(0, 1).flatten(1, 2),
            weight.flatten(0, 1),
            tensors[bias_name].flatten(),
            layer.stride,
            layer.padding,
            layer.dilation,
            groups=len(weight),
        )
        return y.unflatten(1, weight.shape[:2]).transpose(0, 1)

    return Stage(function, [weight_name, bias_name])
