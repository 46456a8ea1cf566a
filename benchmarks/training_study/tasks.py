"""What is trained: a model, its data, optimizer and batches, and a loop that steps and evaluates.

All examples are on the device. Batches and augmentation depend on the seed alone, so that runs with
the same seed see the same batches whatever sets their learning rate. On a GPU the gradients of a
step are one CUDA graph: launching the kernels of these small models takes longer than running them.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from forecast_tasks import Transformer, mlp, resnet
from torch import Tensor, nn
from torch.optim import Optimizer

from equilibrate_paper.protocol.models import Architecture, Convolution, build
from training_study.data import Data, Split

LENGTH = 128
"""Bytes of a sequence."""
SEQUENCES = 1024
"""Sequences of a held-out text on which it is evaluated at most, evenly spaced."""
RECALIBRATION = 50
"""Batches from which BatchNorm's statistics are computed at parameters that were never trained at,
such as averaged ones."""


@dataclass(frozen=True)
class Task:
    """A model, its data, and how it is trained up to the learning rate's schedule."""

    title: str
    data: str
    """Name of the data."""
    model: Callable[[int, bool], nn.Module]
    """Builds the model from a seed, or a tiny one."""
    optimizer: Callable[..., Optimizer]
    settings: dict[str, Any]
    """Arguments of the optimizer, without the learning rate."""
    rates: tuple[float, ...]
    """Eight learning rates, which arms without a setting of their own are tried at."""
    coarse: tuple[float, ...]
    """Four of them, which arms with a setting are tried at, with two values of it."""
    batch_size: int
    budget: int
    """Steps of budget 1."""
    step_ms: float
    """Time of a step on an H200 that 16 runs share, in ms, as assumed without measurement."""
    warm_up: int = 0
    """Steps over which the learning rate rises linearly, whatever the schedule."""
    augment: bool = False
    """Whether images are mirrored and cropped from padded ones at random."""
    fast: bool = False
    """Whether a GPU trains it in bfloat16 where torch does by itself, compiled."""
    amsgrad_rates: tuple[float, ...] = (1e-4, 3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 1e-2, 3e-2)
    schedule_free_factor: float = 1.0
    """What `rates` are multiplied with for the schedule-free optimizer."""

    @property
    def is_text(self) -> bool:
        """Whether the metric is the loss of held-out text and not the accuracy."""
        return self.data == "text"


def _seeded(make: Callable[[bool], nn.Module]) -> Callable[[int, bool], nn.Module]:
    def seeded(seed: int, tiny: bool) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make(tiny)

    return seeded


def _cnn(seed: int, tiny: bool) -> nn.Module:
    if not tiny:
        return build("cnn", seed)
    small = Architecture((3, 32, 32), convolutions=(Convolution(5, 4, 2, 2, 4),))
    return _seeded(lambda _: small.layers())(seed, tiny)


TASKS = {
    "mlp": Task(
        "MLP, MNIST, SGD",
        "mnist",
        _seeded(mlp),
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 1e-4},
        rates=(0.003, 0.01, 0.03, 0.055, 0.1, 0.14, 0.2, 0.4),
        coarse=(0.01, 0.03, 0.1, 0.2),
        batch_size=100,
        budget=9000,
        step_ms=1.1,
        schedule_free_factor=10.0,
    ),
    "cnn": Task(
        "The paper's CNN, CIFAR-10, SGD without momentum",
        "cifar10",
        _cnn,
        torch.optim.SGD,
        {"momentum": 0.0, "weight_decay": 0.01},
        rates=(0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4),
        coarse=(0.02, 0.05, 0.1, 0.2),
        batch_size=100,
        budget=3900,
        step_ms=6.0,
    ),
    "resnet": Task(
        "ResNet-20 with BatchNorm, CIFAR-10, SGD",
        "cifar10",
        _seeded(lambda tiny: resnet(nn.BatchNorm2d, tiny, blocks=3)),
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 5e-4},
        rates=(0.005, 0.01, 0.02, 0.05, 0.1, 0.14, 0.2, 0.4),
        coarse=(0.02, 0.05, 0.1, 0.2),
        batch_size=128,
        budget=3900,
        step_ms=9.0,
        augment=True,
        fast=True,
        schedule_free_factor=10.0,
    ),
    "transformer": Task(
        "Byte-level transformer, Python sources, AdamW",
        "text",
        _seeded(Transformer),
        torch.optim.AdamW,
        {"weight_decay": 0.1},
        rates=(2.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 4e-3, 8e-3),
        coarse=(5e-4, 1e-3, 2e-3, 4e-3),
        batch_size=32,
        budget=3000,
        step_ms=8.0,
        warm_up=100,
        fast=True,
        amsgrad_rates=(2.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 4e-3, 8e-3),
        schedule_free_factor=2.0,
    ),
}


def _count(task: Task, split: Split) -> int:
    """Return the number of examples."""
    return (len(split.inputs) - 1) // LENGTH if task.is_text else len(split.inputs)


class Network:
    """A model with its data, which one run after another trains.

    On a GPU the gradients of a batch are one CUDA graph, which is made once.

    Args:
        task: What to train.
        data: Its data.
        device: Where to train.
        tiny: Whether the model and batches are tiny.
    """

    def __init__(self, task: Task, data: Data, device: str = "cpu", *, tiny: bool = False) -> None:
        self.task, self.device, self.tiny = task, device, tiny
        self.model = task.model(0, tiny).to(device)
        if task.augment:
            self.model = self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        """Sum of the losses of all batches."""
        self._mean, self._scale = data.mean, data.scale
        self._train = data.train.to(device)
        if task.augment:
            self._padded = F.pad(self._train.inputs, (4, 4, 4, 4), value=round(data.mean))
        self._count = _count(task, self._train)
        self.batch_size = min(task.batch_size, 8) if tiny else task.batch_size
        self.epoch = self._count // self.batch_size
        """Steps of an epoch."""
        self._order = torch.arange(self._count, device=device)
        self._draws = torch.zeros(3, self._count if task.augment else 0, 1, device=device)
        self._place = torch.zeros((), dtype=torch.long, device=device)
        self._slots = torch.arange(self.batch_size, device=device)
        self._sides = torch.arange(32, device=device)
        self._fast = task.fast and device == "cuda"
        self._loss = torch.compile(self._plain_loss) if self._fast else self._plain_loss
        self.model.train()
        self._graph = self._capture() if device == "cuda" else None

    def start(self, seed: int) -> None:
        """Set the initial parameters of a seed, and forget all batches."""
        self.model.load_state_dict(self.task.model(seed, self.tiny).state_dict())
        self.model.train()
        self.total.zero_()

    def shuffle(self, seed: int, epoch: int) -> None:
        """Draw the order and the augmentation of an epoch, which is a permutation of the data."""
        generator = torch.Generator().manual_seed(7_919 * seed + epoch)
        self._order.copy_(torch.randperm(self._count, generator=generator))
        self._draws.copy_(torch.rand(self._draws.shape, generator=generator))
        self._place.zero_()

    def skip(self, batches: int) -> None:
        """Leave out the first batches of an epoch."""
        self._place.fill_(batches)

    def backward(self) -> None:
        """Compute the gradients of the next batch of the epoch."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.model.zero_grad()
            self._backward()

    @torch.no_grad()
    def evaluate(self, split: Split) -> tuple[float, float]:
        """Return the mean loss of examples on the device, and the accuracy (nan for a text)."""
        self.model.eval()
        chosen = torch.arange(_count(self.task, split), device=self.device)
        if self.task.is_text:
            chosen = chosen[:: -(-len(chosen) // SEQUENCES)]
        count = len(chosen)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for part in chosen.split(256 if self.task.is_text else 1000):
            inputs, targets = self._examples(split, part)
            logits = self.model(inputs).flatten(0, -2)
            loss = F.cross_entropy(logits, targets.flatten()).double()
            right = (logits.argmax(-1) == targets.flatten()).double().mean()
            total += len(part) * torch.stack([loss, right])
        self.model.train()
        loss, right = (total / count).tolist()
        return loss, math.nan if self.task.is_text else right

    @torch.no_grad()
    def recalibrate(self) -> None:
        """Compute BatchNorm's statistics anew, as the plain mean over some batches."""
        norms = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        fixed = torch.Generator().manual_seed(0)
        for _ in range(RECALIBRATION):  # batches of the present epoch, as they are trained on
            at = torch.randint(self._count, (self.batch_size,), generator=fixed)
            self.model(self._batch(at.to(self.device))[0])
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return the graph of the gradients of a batch, which are in memory of its own."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, chooses algorithms, allocates what libraries need
                self.model.zero_grad()
                self._backward()
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._backward()
        return graph

    def _backward(self) -> None:
        at = self.batch_size * self._place + self._slots
        loss = self._loss(*self._batch(at))
        loss.backward()
        self.total += loss.detach()
        self._place += 1

    def _plain_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # The cache of converted weights must not outlive a step, as it would in a graph.
        with torch.autocast("cuda", torch.bfloat16, self._fast, cache_enabled=False):
            logits = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def _batch(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples at some places of the epoch."""
        chosen = self._order[at]
        if not self.task.augment:
            return self._examples(self._train, chosen)
        # One gather: a window of each padded image, its columns in reverse order if mirrored.
        draws = self._draws[:, at]
        down, right = (9 * draws[:2]).long()
        rows = down + self._sides
        columns = right + torch.where(draws[2] < 0.5, self._sides, 31 - self._sides)
        pixels = self._padded[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return self._normal(pixels.permute(0, 3, 1, 2)), self._train.labels[chosen]

    def _examples(self, split: Split, chosen: Tensor) -> tuple[Tensor, Tensor]:
        if self.task.is_text:
            at = (LENGTH * chosen)[:, None] + torch.arange(LENGTH, device=self.device)
            return split.inputs[at].long(), split.inputs[at + 1].long()
        return self._normal(split.inputs[chosen]), split.labels[chosen]

    def _normal(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self._mean) / self._scale


class Loop:
    """One training.

    Args:
        network: What is trained. Its parameters are set to the initial ones of the seed.
        seed: Seed of the initial parameters, the order of the examples and their augmentation.
        optimizer: Builds the optimizer from the parameters.
    """

    def __init__(
        self,
        network: Network,
        seed: int,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
    ) -> None:
        network.start(seed)
        self.network, self.seed = network, seed
        self.optimizer = optimizer(list(network.model.parameters()))
        self.step = 0

    def train(self) -> None:
        """Make one step with the optimizer's learning rate."""
        epoch, place = divmod(self.step, self.network.epoch)
        if place == 0:
            self.network.shuffle(self.seed, epoch)
        self.network.backward()
        self.optimizer.step()
        self.step += 1

    def metric(
        self, split: Split, averaged: AbstractContextManager[None] | None = None
    ) -> tuple[float, float]:
        """Return the metric of the task, which is the accuracy or the loss, and the loss.

        Args:
            split: The examples.
            averaged: Gives the model other parameters, to evaluate those.
        """
        buffers = [b.clone() for b in self.network.model.buffers()]
        with averaged or nullcontext():
            if averaged is not None and buffers:
                self.network.recalibrate()
            loss, accuracy = self.network.evaluate(split)
        for b, saved in zip(self.network.model.buffers(), buffers, strict=True):
            b.copy_(saved)
        return (loss if self.network.task.is_text else accuracy), loss

    def state_dict(self) -> dict[str, Any]:
        """Return all that the training is continued from."""
        return {
            "model": self.network.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "total": self.network.total,
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a training with the same seed."""
        self.network.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.network.total.copy_(state["total"])
        self.step = state["step"]
        epoch, place = divmod(self.step, self.network.epoch)
        self.network.shuffle(self.seed, epoch)
        self.network.skip(place)
