"""The paper's two networks (appendix B), and small ones for the digits of scikit-learn.

Each network ends in ten logits. The softmax is part of the cross-entropy loss. The L2 term ½ λ θ²,
over weights and biases, is the `weight_decay` of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["ARCHITECTURES", "Architecture", "Convolution", "build"]


class Convolution(NamedTuple):
    """A convolution, a ReLU and a max-pooling: the paper's tuple [F, C, S, P; M]."""

    width: int
    """Width F of the filter."""
    channels: int
    """Number C of output channels."""
    stride: int
    """Stride S."""
    padding: int
    """Padding P."""
    pooling: int
    """Width M of the max-pooling."""


@dataclass(frozen=True)
class Architecture:
    """A network as a value: convolutions, fully connected hidden layers with ReLU, and logits."""

    input_shape: tuple[int, int, int]
    """(channels, height, width) of an image."""
    convolutions: tuple[Convolution, ...] = ()
    """The convolutions, from the input on."""
    hidden: tuple[int, ...] = ()
    """Number of neurons in each hidden layer."""
    classes: int = 10
    """Number of logits."""

    def layers(self) -> nn.Sequential:
        """Return the layers with PyTorch's default initialization.

        >>> Architecture((1, 2, 2), hidden=(3,)).layers()
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=4, out_features=3, bias=True)
          (2): ReLU()
          (3): Linear(in_features=3, out_features=10, bias=True)
        )
        """
        channels, height, width = self.input_shape
        layers: list[nn.Module] = []
        for c in self.convolutions:
            layers += [
                nn.Conv2d(channels, c.channels, c.width, stride=c.stride, padding=c.padding),
                nn.ReLU(),
                nn.MaxPool2d(c.pooling),
            ]
            channels = c.channels
            height, width = (
                ((side + 2 * c.padding - c.width) // c.stride + 1) // c.pooling
                for side in (height, width)
            )
        layers.append(nn.Flatten())
        features = channels * height * width
        for neurons in self.hidden:
            layers += [nn.Linear(features, neurons), nn.ReLU()]
            features = neurons
        layers.append(nn.Linear(features, self.classes))
        return nn.Sequential(*layers)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "mlp": Architecture((1, 28, 28), hidden=(200, 200)),
        "cnn": Architecture(
            (3, 32, 32),
            convolutions=(
                Convolution(5, 16, 1, 2, 2),
                Convolution(5, 20, 1, 2, 2),
                Convolution(5, 20, 1, 2, 2),
            ),
        ),
        "digits-mlp": Architecture((1, 8, 8), hidden=(32, 32)),
        "digits-cnn": Architecture(
            (1, 8, 8), convolutions=(Convolution(5, 8, 1, 2, 2), Convolution(5, 8, 1, 2, 2))
        ),
    }
)


def build(name: str, seed: int) -> nn.Sequential:
    """Build a network of `ARCHITECTURES` with Xavier initialization.

    Weights are drawn from U(−a, a) with a = √(6 / (fan_in + fan_out)); biases are zero. The fans of
    a filter of width F are F² times the number of input and output channels. PyTorch's global
    random state is neither read nor changed.

    >>> model = build("mlp", seed=0)
    >>> sum(p.numel() for p in model.parameters())  # 784·200 + 200·200 + 200·10, and biases
    199210
    >>> model(torch.zeros(3, 1, 28, 28)).shape
    torch.Size([3, 10])

    Args:
        name: The name of the network.
        seed: The seed of the weights.

    Returns:
        The network, on the CPU.

    Raises:
        ValueError: If `name` is unknown.
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"name={name!r} is not a model; choose one of {', '.join(ARCHITECTURES)}")
    with torch.device("meta"):  # the default initialization would draw from the global random state
        model = ARCHITECTURES[name].layers()
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter, generator=generator)
        else:
            nn.init.zeros_(parameter)
    return model
