"""One network with the parameters of several replicas: outputs, losses and gradients of all.

A network is a chain of stages. In each, parameters and inputs alike carry the replicas on their
first axis, and a replica's outputs depend on that replica alone. Autograd differentiates a stage;
the commonest ones say themselves how it is done, which is faster and writes gradients right where
they are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from equilibrate.kernels import conv_relu_pool

Tensors = Mapping[str, Tensor]
Function = Callable[[Tensors, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Network:
    """A module and a loss, bound to tensors (g, …) that hold g replicas of its parameters.

    `differentiate` writes into `gradients`, which names the parameters that are trained.
    `nn.Sequential` is taken layer by layer; what is no known layer, and all where
    `explicit=False`, goes through `torch.func`.

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
    ) -> None:
        layers = list(_layers("", model)) if explicit else [("", [model])]
        owned = [id(p) for _, some in layers for layer in some for p in layer.parameters()]
        if len(set(owned)) < len(owned):  # a parameter used twice has the gradient of both uses
            layers = [("", [model])]
        self.loss = loss
        self._stages: list[Stage] = []
        for prefix, some in layers:
            through = any(stage.trains for stage in self._stages)
            self._stages.append(_stage(prefix, some, tensors, gradients, through))

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs (g, B, …) for inputs (g, B, …)."""
        for stage in self._stages:
            x = stage(x)
        return x

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each replica, (g,)."""
        if self._classifies(outputs, labels):
            return _cross_entropy(outputs, labels)[0]
        return vmap(self.loss)(outputs, labels)

    def differentiate(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of each replica, (g,); gradients are written where the network was bound to."""
        trace = []
        for stage in self._stages:
            x, saved = stage.forward(x)
            trace.append(saved)
        losses, grad = self._differentiated_losses(x, labels)
        for stage, saved in zip(reversed(self._stages), reversed(trace), strict=True):
            if grad is not None:
                grad = stage.backward(saved, grad)
        return losses

    def _differentiated_losses(
        self, outputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor | None]:
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


class Stage:
    """A function of (tensors, inputs), differentiated by autograd.

    `through`: the gradient goes on through its inputs, to stages before it.
    """

    def __init__(
        self, function: Function, tensors: Tensors, gradients: Tensors, through: bool
    ) -> None:
        self._function = function
        self._tensors = tensors
        self._gradients = gradients
        self._leaves = {name: tensors[name].detach().requires_grad_() for name in gradients}
        self._through = through

    @property
    def trains(self) -> bool:
        """Whether it, or a stage before it, has parameters to train."""
        return self._through or bool(self._gradients)

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs alone."""
        return self._function(self._tensors, x)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """The outputs, and what `backward` needs."""
        if not self.trains:
            return self(x), None
        with torch.enable_grad():
            x = x.detach().requires_grad_(self._through)
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
    """y = x Wᵀ + b for each replica."""

    def __init__(self, tensors: Tensors, gradients: Tensors, through: bool) -> None:
        super().__init__(self._linear, tensors, gradients, through)
        # static views: making one takes as long as a small product
        self._weight = tensors["weight"]
        self._weight_transposed = tensors["weight"].mT
        self._bias = tensors["bias"].unsqueeze(1)

    def _linear(self, _: Tensors, x: Tensor) -> Tensor:
        y = torch.baddbmm(self._bias, x.flatten(1, -2), self._weight_transposed)
        return y if x.dim() == 3 else y.unflatten(1, x.shape[1:-1])

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """As `Stage.forward`."""
        return self(x), x

    def backward(self, saved: Any, grad: Tensor) -> Tensor | None:
        """∂W = (∂y)ᵀ x, ∂b = Σ ∂y, ∂x = ∂y W."""
        grad = grad.flatten(1, -2)
        torch.bmm(grad.mT, saved.flatten(1, -2), out=self._gradients["weight"])
        torch.sum(grad, 1, out=self._gradients["bias"])
        if not self._through:
            return None
        found = torch.bmm(grad, self._weight)
        return found if saved.dim() == 3 else found.view(saved.shape)


class ReLUStage(Stage):
    """y = max(x, 0)."""

    def __init__(self, through: bool) -> None:
        super().__init__(lambda _, x: F.relu(x), {}, {}, through)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """As `Stage.forward`."""
        y = F.relu(x)
        return y, y

    def backward(self, saved: Any, grad: Tensor) -> Tensor | None:
        """∂x = ∂y where y > 0."""
        return torch.ops.aten.threshold_backward(grad, saved, 0) if self._through else None


def _cross_entropy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of each replica, and the softmax of the outputs.

    On a CPU torch's own softmax of a few classes takes more than twice as long.
    """
    partition = outputs.logsumexp(-1, keepdim=True)
    losses = partition - outputs.gather(-1, labels.unsqueeze(-1))
    return losses.mean((1, 2)), (outputs - partition).exp_()


def _layers(prefix: str, model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Layers, or several that make one stage, with what stands before their parameters' names."""
    if type(model) is not nn.Sequential or _hooked(model):
        yield prefix, [model]
        return
    items = list(model._modules.items())  # named_children leaves out what comes again
    while items:
        layers = [layer for _, layer in items[:3] if layer is not None]
        length = 3 if _is_conv_relu_pool(layers) else 1
        name = f"{prefix}{items[0][0]}."
        if length == 1:
            yield from _layers(name, layers[0])
        else:
            yield name, layers
        items = items[length:]


def _stage(
    prefix: str, layers: list[nn.Module], tensors: Tensors, gradients: Tensors, through: bool
) -> Stage:
    layer = layers[0]
    named = dict((*layer.named_parameters(), *layer.named_buffers()))
    own = {name: tensors[prefix + name] for name in named}
    trained = {name: gradients[prefix + name] for name in named if prefix + name in gradients}
    if len(layers) == 3:
        return Stage(_conv_relu_pool, own, trained, through)
    kind = None if _hooked(layer) else type(layer)  # exact: a subclass may do something else
    if kind is nn.Linear and list(trained) == ["weight", "bias"]:
        return LinearStage(own, trained, through)
    if kind is nn.ReLU:
        return ReLUStage(through)
    if kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return Stage(lambda _, x: x.flatten(2), own, trained, through)

    # One name for each place that holds a tensor: a tied one is held in several.
    first = {id(tensor): name for name, tensor in named.items()}
    places = {
        f"{path}.{name}" if path else name: first[id(tensor)]
        for path, module in layer.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }

    def one(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        held = {place: tensors[name] for place, name in places.items()}
        return functional_call(layer, held, (x,), tie_weights=False)

    return Stage(lambda tensors, x: vmap(one)(dict(tensors), x), own, trained, through)


def _hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


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


def _conv_relu_pool(tensors: Tensors, x: Tensor) -> Tensor:
    weight, bias = tensors["weight"], tensors["bias"]
    if x.is_cuda:
        # the kernels follow torch's own setting, as its matrix products do
        exact = torch.get_float32_matmul_precision() == "highest"
        return conv_relu_pool(x, weight, bias, precision="tf32x3" if exact else "tf32")
    # On a CPU grouped convolutions, and pooling with channels first, take several times as long.
    pooled = [_channels_last(*replica) for replica in zip(x, weight, bias, strict=True)]
    return torch.stack(pooled).movedim(-1, 2)


def _channels_last(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One replica's convolution, ReLU and pooling, (B, H/2, W/2, C)."""
    x = x.contiguous(memory_format=torch.channels_last)
    y = F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
    return F.max_pool2d(F.relu(y), 2).movedim(1, -1)
