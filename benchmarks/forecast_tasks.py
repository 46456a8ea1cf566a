"""The models, data and optimizers that `forecast.py` trains."""

import hashlib
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pack_data
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class ForecastTask:
    """A model, its data, and how it is trained at a constant learning rate."""

    title: str
    model: Callable[[bool], nn.Module]
    """Builds the model, or a tiny one."""
    data: Callable[[Path | None, bool], "Data"]
    """Reads the data, or makes tiny ones."""
    optimizer: Callable[..., Optimizer]
    settings: dict[str, Any]
    batch_size: int
    times: tuple[int, ...]
    """Steps at which branches begin."""
    warm_up: int = 0
    """Steps over which the learning rate rises."""
    examples: int = 10_000
    """Examples that the training loss is evaluated on."""
    shift: bool = False
    """Whether images are shifted at random, so that the model cannot learn them by heart."""
    flip: bool = False


@dataclass(frozen=True)
class Data:
    """Training examples; the loss is the mean cross-entropy of all targets."""

    inputs: Tensor
    targets: Tensor
    fingerprint: str
    length: int = 0
    """Length of a sequence, for a text; 0 for images."""

    def __len__(self) -> int:
        return len(self.inputs) // self.length if self.length else len(self.inputs)

    def to(self, device: str) -> "Data":
        """Move the examples to a device."""
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return Data(inputs, targets, self.fingerprint, self.length)

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return some examples."""
        if not self.length:
            return self.inputs[chosen].float(), self.targets[chosen]
        at = (chosen * self.length)[:, None] + torch.arange(self.length, device=chosen.device)
        at = at.clamp(max=len(self.inputs) - 2)
        return self.inputs[at].long(), self.inputs[at + 1].long()


def flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images of which half, at random, are mirrored."""
    chosen = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(chosen.to(images.device), images.flip(-1), images)


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images that are shifted by up to two pixels, each quarter of them by its own."""
    height, width = images.shape[-2:]
    parts = []
    for part in F.pad(images, (2, 2, 2, 2)).chunk(4):
        down, right = torch.randint(5, (2,), generator=generator).tolist()
        parts.append(part[..., down : down + height, right : right + width])
    return torch.cat(parts)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with a residual connection."""

    def __init__(self, channels: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        stride = 1 if channels == outputs else 2
        self.body = nn.Sequential(
            nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False),
            norm(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            norm(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), norm(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(norm: Callable[[int], nn.Module], tiny: bool, blocks: int = 2) -> nn.Module:
    """A ResNet of three stages, 16, 32 and 64 channels, with some blocks each."""
    widths = (8,) if tiny else (16, 32, 64)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), norm(widths[0])]
    channels = widths[0]
    for width in widths:
        for _ in range(1 if tiny else blocks):
            layers.append(ResidualBlock(channels, width, norm))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def mlp(tiny: bool) -> nn.Module:
    """The paper's multilayer perceptron, 784-200-200-10."""
    width = 8 if tiny else 200
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


class Attention(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """A byte-level language model."""

    def __init__(self, tiny: bool, length: int = 128) -> None:
        super().__init__()
        width, heads, depth = (16, 2, 1) if tiny else (192, 6, 4)
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Attention(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))


def images(name: str) -> Callable[[Path | None, bool], Data]:
    """Return a function that reads a data set of images from a packed file."""

    def make(path: Path | None, tiny: bool) -> Data:
        if tiny:
            generator = torch.Generator().manual_seed(0)
            shape = (1, 28, 28) if name == "mnist" else (3, 32, 32)
            pixels = torch.randn(256, *shape, generator=generator)
            return Data(pixels, torch.randint(10, (256,), generator=generator), "random")
        if path is None:
            raise SystemExit("--data is missing: pass the file that pack_data.py wrote")
        packed, labels = pack_data.read(path)[name]
        pixels = torch.from_numpy(packed).float()
        pixels = (pixels - pixels.mean()) / pixels.std()
        fingerprint = hashlib.sha256(packed.tobytes()).hexdigest()[:16]
        return Data(pixels, torch.from_numpy(labels).long(), fingerprint)

    return make


def source_code(path: Path | None, tiny: bool) -> Data:
    """Return the sources of Python's standard library as bytes, files in the order of names."""
    folder, limit = Path(sysconfig.get_path("stdlib")), 1 << (15 if tiny else 23)
    text = bytearray()
    for file in sorted(folder.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idlelib"} & set(file.parts):
            text += file.read_bytes()
        if len(text) > limit:
            break
    data = torch.frombuffer(text[:limit], dtype=torch.uint8).clone()
    return Data(data, data, hashlib.sha256(text[:limit]).hexdigest()[:16], length=128)


SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
TASKS = {
    "mlp": ForecastTask(
        "MLP, MNIST, SGD",
        mlp,
        images("mnist"),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4},
        batch_size=100,
        times=(800, 2400, 6000),
        shift=True,
    ),
    "batchnorm": ForecastTask(
        "ResNet with BatchNorm, CIFAR-10, SGD",
        lambda tiny: resnet(nn.BatchNorm2d, tiny),
        images("cifar10"),
        torch.optim.SGD,
        SGD,
        batch_size=128,
        times=(800, 2000, 5000),
        shift=True,
        flip=True,
    ),
    "groupnorm": ForecastTask(
        "ResNet with GroupNorm, CIFAR-10, SGD",
        lambda tiny: resnet(lambda channels: nn.GroupNorm(8, channels), tiny),
        images("cifar10"),
        torch.optim.SGD,
        SGD | {"lr": 0.05},
        batch_size=128,
        times=(800, 2000, 5000),
        shift=True,
        flip=True,
    ),
    "transformer": ForecastTask(
        "Byte-level transformer, Python sources, AdamW",
        Transformer,
        source_code,
        torch.optim.AdamW,
        {"lr": 1e-3, "weight_decay": 0.1},
        batch_size=32,
        times=(1000, 2500, 5000),
        warm_up=200,
        examples=2048,
    ),
}


class Training:
    """One run: a model, its optimizer, and batches that depend on the seed and the step alone.

    Args:
        task: What to train.
        data: The data, on the device.
        seed: Seed of the initial parameters, the order of the examples and their augmentation.
        tiny: Whether the model is tiny.
    """

    def __init__(self, task: ForecastTask, data: Data, seed: int, *, tiny: bool) -> None:
        self.task, self.data, self.seed = task, data, seed
        self.device = data.inputs.device
        torch.manual_seed(seed)
        self.model = task.model(tiny).to(self.device)
        self.optimizer = task.optimizer(self.model.parameters(), **task.settings)
        self.batch_size = min(task.batch_size, len(data) // 4)
        self.step = 0
        self._epoch: tuple[int, Tensor] | None = None
        fixed = torch.Generator().manual_seed(12345)
        self._fixed = torch.randperm(len(data), generator=fixed)[: task.examples]

    def train(self, lr: float) -> Tensor:
        """Make one step and return the loss of its batch before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = self._batch(self._chosen(), 1_000_003 * self.seed + self.step)
        self.optimizer.zero_grad()
        loss = self._loss(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def constant_lr(self) -> float:
        """Return the learning rate of the trunk at this step."""
        base, warm_up = self.task.settings["lr"], self.task.warm_up
        return base * min(1.0, (self.step + 1) / warm_up) if warm_up else base

    def independent_gradient(self, generator: torch.Generator) -> list[Tensor]:
        """Return the gradient of a batch that is drawn independently of all others."""
        buffers = [b.clone() for b in self.model.buffers()]
        chosen = torch.randint(len(self.data), (self.batch_size,), generator=generator)
        seed = int(torch.randint(1 << 30, (1,), generator=generator))
        loss = self._loss(*self._batch(chosen, seed))
        gradient = torch.autograd.grad(loss, list(self.model.parameters()))
        self._restore(buffers)
        return list(gradient)

    @torch.no_grad()
    def _restore(self, buffers: list[Tensor]) -> None:
        for b, saved in zip(self.model.buffers(), buffers, strict=True):
            b.copy_(saved)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the training loss on fixed examples, as the optimizer sees it.

        That is with the statistics of batches of the training's size behind BatchNorm, and with
        augmentation that is always the same.
        """
        buffers = [b.clone() for b in self.model.buffers()]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        parts = self._fixed.split(self.batch_size)
        parts = [part for part in parts if len(part) == self.batch_size]
        for i, chosen in enumerate(parts):
            total += self._loss(*self._batch(chosen, i)).double()
        self._restore(buffers)
        return total.item() / len(parts)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())

    def _batch(self, chosen: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.data.batch(chosen.to(self.device))
        generator = torch.Generator().manual_seed(seed)
        if self.task.flip:
            inputs = flipped(inputs, generator)
        return shifted(inputs, generator) if self.task.shift else inputs, targets

    def _chosen(self) -> Tensor:
        per_epoch = len(self.data) // self.batch_size
        epoch, place = divmod(self.step, per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(7_919 * self.seed + epoch)
            self._epoch = epoch, torch.randperm(len(self.data), generator=generator)
        return self._epoch[1][place * self.batch_size :][: self.batch_size]


def half_life_decay(half_life: float) -> float:
    """Return the decay per step of an average with this half-life."""
    return math.exp(-math.log(2) / half_life)
