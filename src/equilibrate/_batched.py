"""One forward pass for R replicas of a module: vmap for any module, explicit for the common ones.

Parameters carry the replicas on their first axis. `nn.Sequential` of the layers below is done with
batched products, which is several times faster for small networks; all else goes through
`torch.func.vmap`. Both are differentiable, and a replica's outputs depend on that replica alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

Tensors = Mapping[str, Tensor]
Forward = Callable[[Tensors, Tensor], Tensor]
"""(parameters of all replicas by name, inputs (R, B, …)) -> outputs (R, B, …)."""


def vmapped(model: nn.Module) -> Forward:
    """The forward pass of any module, by `torch.func`."""

    def one(tensors: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(model, tensors, (inputs,))

    return lambda tensors, inputs: vmap(one)(dict(tensors), inputs)


def explicit(model: nn.Module) -> Forward | None:
    """The forward pass of a Sequential, layer by layer; None where a layer is not known here."""
    if not isinstance(model, nn.Sequential):
        return None
    stages = [_stage(name, layer) for name, layer in _leaves("", model)]
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages):
        return None

    def forward(tensors: Tensors, inputs: Tensor) -> Tensor:
        for stage in known:
            inputs = stage(tensors, inputs)
        return inputs

    return forward


def _leaves(prefix: str, model: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in model.named_children():
        if isinstance(layer, nn.Sequential):
            yield from _leaves(f"{prefix}{name}.", layer)
        else:
            yield f"{prefix}{name}", layer


def _stage(name: str, layer: nn.Module) -> Forward | None:
    # A subclass may do something else in its forward, so exact types alone.
    if type(layer) is nn.Linear:
        return _linear(name, layer)
    if type(layer) is nn.Conv2d:
        return _convolution(name, layer)
    if type(layer) is nn.MaxPool2d:
        return lambda _, x: layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return lambda _, x: x.flatten(2)
    if type(layer) in (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Identity):
        return lambda _, x: layer(x)
    return None


def _linear(name: str, layer: nn.Linear) -> Forward:
    def forward(tensors: Tensors, x: Tensor) -> Tensor:
        weight = tensors[f"{name}.weight"].mT
        if layer.bias is None:
            return torch.bmm(x, weight)
        return torch.baddbmm(tensors[f"{name}.bias"].unsqueeze(1), x, weight)

    return forward


def _convolution(name: str, layer: nn.Conv2d) -> Forward | None:
    if layer.groups != 1 or layer.padding_mode != "zeros":
        return None

    def forward(tensors: Tensors, x: Tensor) -> Tensor:
        weight = tensors[f"{name}.weight"]
        bias = None if layer.bias is None else tensors[f"{name}.bias"].flatten()
        y = F.conv2d(
            x.transpose(0, 1).flatten(1, 2),  # replicas become groups of channels
            weight.flatten(0, 1),
            bias,
            layer.stride,
            layer.padding,
            layer.dilation,
            groups=len(weight),
        )
        return y.unflatten(1, weight.shape[:2]).transpose(0, 1)

    return forward
