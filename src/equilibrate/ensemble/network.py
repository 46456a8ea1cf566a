"""One network with the parameters of several replicas: outputs, losses and gradients of all."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from equilibrate.ensemble import stages
from equilibrate.ensemble.batches import DataSet, Examples
from equilibrate.ensemble.precision import Precision
from equilibrate.ensemble.stages import (
    SECOND,
    ConvReluPoolStage,
    Held,
    LinearStage,
    ReLUStage,
    Stage,
    Tensors,
)

Loss = Callable[[Tensor, Tensor], Tensor]

# A kernel holds a row of them at once.
_FUSED_CLASSES = 4096


class Network:
    """A module and a loss, bound to tensors (g, …) that hold g replicas of its parameters.

    `differentiate` writes into `gradients`, which names the parameters that are trained.
    `nn.Sequential` is taken layer by layer, as a chain of stages; what is no known layer, and all
    where `explicit=False`, goes through `torch.func`. `fused`: what is between the matrix products
    goes through Triton kernels. `precision` is that of convolutions then.

    >>> tensors = {"weight": torch.ones(3, 1, 2), "bias": torch.zeros(3, 1)}  # three replicas
    >>> gradients = {"weight": torch.empty(3, 1, 2), "bias": torch.empty(3, 1)}
    >>> network = Network(nn.Linear(2, 1), F.mse_loss, tensors, gradients)
    >>> network.differentiate(torch.ones(3, 5, 2), torch.ones(3, 5, 1))
    tensor([1., 1., 1.])
    >>> gradients["weight"][0]
    tensor([[2., 2.]])
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        tensors: Tensors,
        gradients: Tensors,
        *,
        explicit: bool = True,
        fused: bool = False,
        precision: Precision = "fp32",
    ) -> None:
        layers = list(_layers("", model, gradients)) if explicit else [("", [model])]
        owned = [id(p) for _, some in layers for layer in some for p in layer.parameters()]
        if len(set(owned)) < len(owned):  # a parameter used twice has the gradient of both uses
            layers = [("", [model])]
        self.loss = loss
        self._fused = fused
        self._stages: list[Stage] = []
        for prefix, some in layers:
            named = dict((*some[0].named_parameters(), *some[0].named_buffers()))
            held = Held(
                {name: tensors[prefix + name] for name in named},
                {name: gradients[prefix + name] for name in named if prefix + name in gradients},
                through=any(stage.trains for stage in self._stages),
            )
            self._stages.append(_stage(some, held, fused, precision))

    @property
    def gathers(self) -> bool:
        """Whether the first stage takes its images out of the data set by itself."""
        return self._stages[0].gathers

    def prepare(self, images: Tensor) -> DataSet:
        """A data set as the first stage wants to read it."""
        return self._stages[0].prepare(images)

    def outputs(self, x: Tensor | Examples) -> Tensor:
        """Outputs (g, B, …) for inputs (g, B, …)."""
        x = self._inputs(x)
        for stage in self._stages:
            x = stage(x)
        return cast(Tensor, x)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each replica, (g,)."""
        if self._classifies(outputs, labels):
            return _cross_entropy(outputs, labels)[0]
        return vmap(self.loss)(outputs, labels)

    def differentiate(self, x: Tensor | Examples, labels: Tensor) -> Tensor:
        """The loss of each replica, (g,); gradients are written where the network was bound to."""
        x, trace = self._inputs(x), []
        *before, last = self._stages
        for stage in before:
            x, saved = stage.forward(x)
            trace.append(saved)
        if self._fused and isinstance(last, LinearStage) and self._closes(last, x, labels):
            losses, grad = last.close(x, labels)
        else:
            outputs, saved = last.forward(x)
            losses, grad = self._differentiated_losses(outputs, labels)
            grad = last.backward(saved, grad)
        for stage, saved in zip(reversed(before), reversed(trace), strict=True):
            if grad is not None:
                grad = stage.backward(saved, grad)
        if any(isinstance(stage, LinearStage) for stage in self._stages):
            SECOND.join(losses.device)
        return losses

    def _inputs(self, x: Tensor | Examples) -> Tensor | Examples:
        return x if self.gathers or isinstance(x, Tensor) else x.gathered()

    def _closes(self, last: LinearStage, x: Tensor | Examples, labels: Tensor) -> bool:
        """Whether the loss is one with the last layer."""
        few = last.outputs <= _FUSED_CLASSES and not last.relu
        three = isinstance(x, Tensor) and x.dim() == 3
        return few and three and self.loss is F.cross_entropy and labels.dim() == 2

    def _differentiated_losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self._classifies(outputs, labels):
            losses, softmax = _cross_entropy(outputs, labels)
            softmax.scatter_(-1, labels.unsqueeze(-1), -1.0, reduce="add")
            return losses, softmax.div_(labels.shape[1])
        with torch.enable_grad():
            outputs = outputs.detach().requires_grad_()
            losses = self.losses(outputs, labels)
            # the sum over replicas has each replica's gradient in its own place
            return losses.detach(), torch.autograd.grad(losses.sum(), outputs)[0]

    def _classifies(self, outputs: Tensor, labels: Tensor) -> bool:
        return self.loss is F.cross_entropy and outputs.dim() == 3 and labels.dim() == 2


def _cross_entropy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of each replica, and the softmax of the outputs.

    On a CPU torch's own softmax of a few classes takes more than twice as long.
    """
    partition = outputs.logsumexp(-1, keepdim=True)
    losses = partition - outputs.gather(-1, labels.unsqueeze(-1))
    return losses.mean((1, 2)), (outputs - partition).exp_()


def _layers(
    prefix: str, model: nn.Module, trained: Container[str]
) -> Iterator[tuple[str, list[nn.Module]]]:
    """Layers, or several that make one stage, with what stands before their parameters' names."""
    if type(model) is not nn.Sequential or _hooked(model):
        yield prefix, [model]
        return
    items = list(model._modules.items())  # named_children leaves out what comes again
    while items:
        name = f"{prefix}{items[0][0]}."
        layers = [layer for _, layer in items[:3] if layer is not None]
        length = 1
        if _is_conv_relu_pool(layers):
            length = 3
        elif _is_linear(layers[0], name, trained) and [type(x) for x in layers[1:2]] == [nn.ReLU]:
            length = 1 if _hooked(layers[1]) else 2
        if length == 1:
            yield from _layers(name, layers[0], trained)
        else:
            yield name, layers[:length]
        items = items[length:]


def _stage(layers: list[nn.Module], held: Held, fused: bool, precision: Precision) -> Stage:
    layer = layers[0]
    if len(layers) == 3:
        return ConvReluPoolStage(held, fused=fused, precision=precision)
    if _is_linear(layer, "", held.gradients):
        return LinearStage(held, relu=len(layers) == 2, fused=fused)
    kind = None if _hooked(layer) else type(layer)  # exact: a subclass may do something else
    if kind is nn.ReLU:
        return ReLUStage(held)
    if kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return stages.flatten(held)
    return stages.of_module(layer, held)


def _hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _is_linear(layer: nn.Module, prefix: str, trained: Container[str]) -> bool:
    """Whether this is a linear layer with a bias, all of it trained."""
    names = (f"{prefix}weight", f"{prefix}bias")
    return type(layer) is nn.Linear and not _hooked(layer) and all(n in trained for n in names)


def _is_conv_relu_pool(layers: list[nn.Module]) -> bool:
    """Whether these are what `kernels.conv_relu_pool` does in one."""
    if [type(layer) for layer in layers] != [nn.Conv2d, nn.ReLU, nn.MaxPool2d]:
        return False
    conv, pool = cast(nn.Conv2d, layers[0]), cast(nn.MaxPool2d, layers[2])
    width = conv.kernel_size[0]
    return (
        not any(_hooked(layer) for layer in layers)
        and conv.kernel_size == (width, width)
        and width % 2 == 1
        and conv.padding == (width // 2, width // 2)
        and (conv.stride, conv.dilation, conv.groups) == ((1, 1), (1, 1), 1)
        and conv.padding_mode == "zeros"
        and conv.bias is not None
        and (pool.kernel_size, pool.stride, pool.padding, pool.dilation) == (2, 2, 0, 1)
        and not (pool.ceil_mode or pool.return_indices)
    )
