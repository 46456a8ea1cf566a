"""A network with the parameters of several replicas: outputs, losses and gradients of all."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from equilibrate_paper.ensemble._ops import Ops, plain
from equilibrate_paper.ensemble.data.examples import IndexedInputs, PreparedInputs
from equilibrate_paper.ensemble.stages import (
    SIDE_STREAM,
    ConvReluPoolStage,
    LinearStage,
    ReLUStage,
    Stage,
    StageTensors,
    Tensors,
    flatten_stage,
    module_stage,
)

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of (outputs, targets) that returns the mean loss of a mini-batch."""


class Network:
    """A module and a loss, applied to the parameters of R replicas at once.

    An `nn.Sequential` is split into its layers. Layers that are not known, and all of them with
    `explicit=False`, are differentiated with `torch.func` and autograd.

    Args:
        model: The module.
        loss: The loss.
        tensors: Parameters and buffers of all replicas by name, (R, …).
        gradients: Where `differentiate` writes the gradients, for the parameters that are trained.
        ops: The operations to use.
        explicit: Whether to compute the gradients of known layers explicitly.

    Example:
        >>> from equilibrate_paper.ensemble._ops.plain import PlainOps
        >>> tensors = {"weight": torch.ones(3, 1, 2), "bias": torch.zeros(3, 1)}  # three replicas
        >>> gradients = {"weight": torch.empty(3, 1, 2), "bias": torch.empty(3, 1)}
        >>> network = Network(nn.Linear(2, 1), F.mse_loss, tensors, gradients, ops=PlainOps())
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
        ops: Ops,
        explicit: bool = True,
    ) -> None:
        layers = list(_layers("", model, gradients)) if explicit else [("", [model])]
        owned = [id(p) for _, some in layers for layer in some for p in layer.parameters()]
        if len(set(owned)) < len(owned):  # the gradient of a shared parameter sums over its uses
            layers = [("", [model])]
        self.loss = loss
        self._stages: list[Stage] = []
        for prefix, some in layers:
            named = dict((*some[0].named_parameters(), *some[0].named_buffers()))
            own = StageTensors(
                {name: tensors[prefix + name] for name in named},
                {name: gradients[prefix + name] for name in named if prefix + name in gradients},
                differentiates_inputs=any(stage.needs_gradient for stage in self._stages),
            )
            self._stages.append(_stage(some, own, ops))

    @property
    def reads_indices(self) -> bool:
        """Whether the first stage takes `IndexedInputs`."""
        return self._stages[0].reads_indices

    def prepare(self, inputs: Tensor) -> PreparedInputs:
        """Prepare a data set for the first stage.

        Args:
            inputs: The inputs of the data set, (N, …).

        Returns:
            The inputs in the form that the first stage reads.
        """
        return self._stages[0].prepare(inputs)

    def outputs(self, x: Tensor | IndexedInputs) -> Tensor:
        """Compute the outputs.

        Args:
            x: Inputs, (R, B, …).

        Returns:
            Outputs, (R, B, …).
        """
        x = self._inputs(x)
        for stage in self._stages:
            x = stage(x)
        return cast(Tensor, x)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of each replica.

        Args:
            outputs: Outputs, (R, B, …).
            targets: Targets, (R, B, …).

        Returns:
            The losses, (R,).
        """
        if self._is_classification(outputs, targets):
            return plain.cross_entropy(outputs, targets)
        return vmap(self.loss)(outputs, targets)

    def differentiate(self, x: Tensor | IndexedInputs, targets: Tensor) -> Tensor:
        """Compute the loss of each replica and write its gradient.

        Args:
            x: Inputs, (R, B, …).
            targets: Targets, (R, B, …).

        Returns:
            The losses, (R,).
        """
        x, trace = self._inputs(x), []
        *before, last = self._stages
        for stage in before:
            x, saved = stage.forward(x)
            trace.append(saved)
        if isinstance(last, LinearStage) and not last.relu and self._is_classification(x, targets):
            losses, grad = last.differentiate_cross_entropy(cast(Tensor, x), targets)
        else:
            outputs, saved = last.forward(x)
            losses, grad = self._losses_and_gradient(outputs, targets)
            grad = last.backward(saved, grad)
        for stage, saved in zip(reversed(before), reversed(trace), strict=True):
            if grad is not None:
                grad = stage.backward(saved, grad)
        if any(isinstance(stage, LinearStage) for stage in self._stages):
            SIDE_STREAM.join(losses.device)
        return losses

    def _inputs(self, x: Tensor | IndexedInputs) -> Tensor | IndexedInputs:
        return x if self.reads_indices or isinstance(x, Tensor) else x.gather()

    def _losses_and_gradient(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self._is_classification(outputs, targets):
            return plain.cross_entropy_and_gradient(outputs, targets)
        with torch.enable_grad():
            outputs = outputs.detach().requires_grad_()
            losses = self.losses(outputs, targets)
            # The sum over replicas has the gradient of each replica in its own rows.
            return losses.detach(), torch.autograd.grad(losses.sum(), outputs)[0]

    def _is_classification(self, x: Tensor | IndexedInputs, targets: Tensor) -> bool:
        """Return whether the loss is a cross-entropy of outputs, or last inputs, (R, B, C)."""
        tensors = isinstance(x, Tensor) and x.dim() == 3 and targets.dim() == 2
        return tensors and self.loss is F.cross_entropy


def _layers(
    prefix: str, model: nn.Module, trained: Container[str]
) -> Iterator[tuple[str, list[nn.Module]]]:
    # Splits a model into the layers of each stage, with the prefix of their parameter names.
    if type(model) is not nn.Sequential or _hooked(model):
        yield prefix, [model]
        return
    items = list(model._modules.items())  # named_children omits repeated modules
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


def _stage(layers: list[nn.Module], own: StageTensors, ops: Ops) -> Stage:
    layer = layers[0]
    if len(layers) == 3:
        return ConvReluPoolStage(own, ops)
    if _is_linear(layer, "", own.gradients):
        return LinearStage(own, ops, relu=len(layers) == 2)
    kind = None if _hooked(layer) else type(layer)  # a subclass may compute something else
    if kind is nn.ReLU:
        return ReLUStage(own)
    if kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return flatten_stage(own)
    return module_stage(layer, own)


def _hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _is_linear(layer: nn.Module, prefix: str, trained: Container[str]) -> bool:
    """Return whether this is a linear layer with a bias, both of them trained."""
    names = (f"{prefix}weight", f"{prefix}bias")
    return type(layer) is nn.Linear and not _hooked(layer) and all(n in trained for n in names)


def _is_conv_relu_pool(layers: list[nn.Module]) -> bool:
    """Return whether `Ops.conv_relu_pool` computes these layers."""
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
