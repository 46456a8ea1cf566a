"""Models, data and optimizers that the overhead benchmarks train."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "sgd-decay": (torch.optim.SGD, {"lr": 0.01, "weight_decay": 5e-4}),
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
    ),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
}
FUSED = "-fused"
"""Suffix of an optimizer's name for its fused implementation."""


def make_optimizer(name: str, params: Iterable[nn.Parameter]) -> Optimizer:
    """Create an optimizer from its name in `OPTIMIZERS`, with or without the suffix `FUSED`."""
    kind, settings = OPTIMIZERS[name.removesuffix(FUSED)]
    return kind(params, **settings, fused=name.endswith(FUSED) or None)


@dataclass(frozen=True)
class Workload:
    """A model and one batch of data, on one device."""

    title: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    autocast: bool = False
    """Whether the forward pass runs in bfloat16."""
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda model, inputs, targets: (
        F.cross_entropy(model(inputs), targets)
    )

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def backward(self, model: nn.Module) -> Tensor:
        """Compute the gradients of a copy of the model, and return the loss."""
        device = self.inputs.device.type
        with torch.autocast(device, torch.bfloat16) if self.autocast else nullcontext():
            loss = self.loss(model, self.inputs, self.targets)
        loss.backward()
        return loss.detach()


def mlp(device: str, *, batch_size: int = 100, tiny: bool = False) -> Workload:
    """The paper's multilayer perceptron, 784-200-200-10."""
    torch.manual_seed(0)
    width = 8 if tiny else 200
    model = nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    ).to(device)
    return Workload("MLP 784-200-200-10", model, *_images(batch_size, (784,), device))


class ResNet18Block(nn.Module):
    """Two 3×3 convolutions with a residual connection."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if channels == outputs and stride == 1
            else nn.Sequential(
                nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet18(
    device: str, *, batch_size: int = 128, autocast: bool = False, tiny: bool = False
) -> Workload:
    """ResNet-18 for 32×32 images: a 3×3 stem and no first pooling."""
    torch.manual_seed(0)
    width, size = (4, 8) if tiny else (64, 32)
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels = width
    for scale, stride in [(1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1)]:
        layers.append(ResNet18Block(channels, scale * width, stride))
        channels = scale * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    model = nn.Sequential(*layers).to(device)
    return Workload("ResNet-18", model, *_images(batch_size, (3, size, size), device), autocast)


def gpt2(
    device: str, *, batch_size: int = 16, autocast: bool = False, tiny: bool = False
) -> Workload:
    """GPT-2 with 124 million parameters on sequences of 512 tokens, from its default config."""
    # Imported here: only this workload needs it.
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    settings = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64} if tiny else {}
    config = GPT2Config(**settings, use_cache=False)
    model = GPT2LMHeadModel(config).to(device).train()
    length = 16 if tiny else 512
    tokens = torch.randint(config.vocab_size, (batch_size, length)).to(device)

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return model(input_ids=inputs, labels=targets).loss

    return Workload("GPT-2 124M", model, tokens, tokens, autocast, loss)


def has_transformers() -> bool:
    """Return whether the GPT-2 workload can be built."""
    return find_spec("transformers") is not None


def _images(batch_size: int, shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(batch_size, *shape, generator=generator)
    targets = torch.randint(10, (batch_size,), generator=generator)
    return inputs.to(device), targets.to(device)
