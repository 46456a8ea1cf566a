"""The models, data and optimizers that `forecast.py` trains."""

import copy
import hashlib
import lzma
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
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
    """Reads the data from a folder, or makes tiny ones."""
    optimizer: Callable[..., Optimizer]
    settings: dict[str, Any]
    batch_size: int
    branches: dict[int, tuple[int, ...]]
    """Lengths of the cooldowns that begin at some steps."""
    steps: int = 5000
    """Length of the training, where schedules end."""
    warm_up: int = 0
    """Steps over which the learning rate rises."""
    evaluated: int = 64
    """Batches that the loss is evaluated on, held-out ones and coming ones."""
    around: int = 96
    """Steps before and after a moment over which its loss is averaged."""
    shift: bool = False
    """Whether images are shifted at random, so that the model cannot learn them by heart."""
    flip: bool = False
    large: bool = False
    """Whether the model is compiled and trained in bfloat16."""
    clip: float | None = None
    """Norm at which gradients are clipped."""


@dataclass(frozen=True)
class Data:
    """Examples; the loss is the mean cross-entropy of all targets."""

    inputs: Tensor
    targets: Tensor
    fingerprint: str
    held_out: int
    """How many of the first examples are never trained on."""
    length: int = 0
    """Length of a sequence, for a text; 0 for images."""

    def __len__(self) -> int:
        """Number of examples that are trained on."""
        return len(self.inputs) // (self.length or 1) - self.held_out

    def to(self, device: str) -> "Data":
        """Move the examples to a device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return some examples; those that are trained on come after those that are held out."""
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


def mlp(tiny: bool, *, bias: bool = True) -> nn.Module:
    """The paper's multilayer perceptron, 784-200-200-10."""
    width = 8 if tiny else 200
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, width, bias),
        nn.ReLU(),
        nn.Linear(width, width, bias),
        nn.ReLU(),
        nn.Linear(width, 10, bias),
    )


class Attention(nn.Module):
    """Self-attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """A language model like GPT-2: the embedding of a token is also its row of the output."""

    def __init__(self, tokens: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        blocks = [Attention(width, heads, causal=True) for _ in range(depth)]
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.token.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in blocks:
            for last in (block.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))


class VisionTransformer(nn.Module):
    """A classifier of images cut into patches of 4 × 4 pixels."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        width, heads, depth = (16, 2, 1) if tiny else (192, 3, 6)
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.place = nn.Parameter(0.02 * torch.randn(64, width))
        blocks = (Attention(width, heads, causal=False) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


def small_transformer(tiny: bool) -> nn.Module:
    """A transformer of four blocks."""
    return Transformer(64, 32, 16, 2, 1) if tiny else Transformer(16_384, 128, 192, 6, 4)


def smallest_transformer(tiny: bool) -> nn.Module:
    """A transformer of three blocks and 440,000 parameters, for a CPU."""
    return Transformer(64, 32, 16, 2, 1) if tiny else Transformer(1024, 32, 96, 4, 3)


def gpt2(tiny: bool) -> nn.Module:
    """GPT-2 124M: 12 blocks of width 768, with as many rows for tokens as it has."""
    return Transformer(64, 32, 16, 2, 1) if tiny else Transformer(50_304, 1024, 768, 12, 12)


def images(name: str) -> Callable[[Path | None, bool], Data]:
    """Return a function that reads a data set of images, of which a tenth is held out."""

    def make(folder: Path | None, tiny: bool) -> Data:
        if tiny:
            generator = torch.Generator().manual_seed(0)
            shape = (1, 28, 28) if name == "mnist" else (3, 32, 32)
            pixels = torch.randn(256, *shape, generator=generator)
            return Data(pixels, torch.randint(10, (256,), generator=generator), "random", 64)
        packed, labels = pack_data.read(_file(folder, f"{name}.xz"))
        pixels = torch.from_numpy(packed).float()
        pixels = (pixels - pixels.mean()) / pixels.std()
        fingerprint = hashlib.sha256(packed.tobytes()).hexdigest()[:16]
        return Data(pixels, torch.from_numpy(labels).long(), fingerprint, len(packed) // 10)

    return make


def linux_sources(length: int, symbols: int | None = None) -> Callable[[Path | None, bool], Data]:
    """Return a function that reads tokens of Linux's source code; the first hundredth is held out.

    It reads all of them for sequences of 1,024, and a sixth, which is enough, for shorter ones.

    Args:
        length: Length of a sequence.
        symbols: Leave out all but the first tokens of the vocabulary, which are the most frequent.
    """

    def make(folder: Path | None, tiny: bool) -> Data:
        if tiny:
            tokens = torch.randint(64, (1 << 14,), generator=torch.Generator().manual_seed(0))
            return Data(tokens, tokens, "random", 64, 32)
        with lzma.open(_file(folder, "tokens.bin.xz")) as file:
            packed = np.frombuffer(file.read(-1 if length == 1024 else 2 * _PART), dtype="<u2")
        packed = packed if symbols is None else packed[packed < symbols]
        tokens = torch.from_numpy(packed.astype(np.int16))
        fingerprint = hashlib.sha256(packed.tobytes()).hexdigest()[:16]
        return Data(tokens, tokens, fingerprint, len(packed) // length // 100, length)

    return make


def _file(folder: Path | None, name: str) -> Path:
    if folder is None or not (folder / name).exists():
        raise SystemExit(f"pass the folder that holds {name} as --data")
    return folder / name


_PART = 22_220_800
"""Tokens that are read for short sequences; no training comes to their end."""
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
BRANCHES = {
    1000: (150, 400),
    2000: (150, 500),
    2500: (2500,),
    3500: (1500,),
    4000: (300, 1000),
    4500: (500,),
}
"""Those that end at step 5,000 are the last 0.5, 0.3, 0.2 and 0.1 of a training."""
TASKS = {
    "mlp": ForecastTask(
        "MLP, MNIST, SGD",
        mlp,
        images("mnist"),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4},
        batch_size=100,
        branches=BRANCHES,
        evaluated=128,
        shift=True,
    ),
    "batchnorm": ForecastTask(
        "ResNet with BatchNorm, CIFAR-10, SGD",
        lambda tiny: resnet(nn.BatchNorm2d, tiny),
        images("cifar10"),
        torch.optim.SGD,
        SGD,
        batch_size=128,
        branches=BRANCHES,
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
        branches=BRANCHES,
        shift=True,
        flip=True,
    ),
    "transformer": ForecastTask(
        "Small transformer, Linux sources, AdamW",
        small_transformer,
        linux_sources(128),
        torch.optim.AdamW,
        {"lr": 1e-3, "weight_decay": 0.1},
        batch_size=32,
        branches=BRANCHES,
        warm_up=200,
        evaluated=64,
    ),
    "text": ForecastTask(
        "Smallest transformer, Linux sources, AdamW",
        smallest_transformer,
        linux_sources(32, symbols=1024),
        torch.optim.AdamW,
        {"lr": 1e-3, "weight_decay": 0.1},
        batch_size=32,
        branches=BRANCHES,
        warm_up=200,
        evaluated=128,
    ),
    "vit": ForecastTask(
        "Vision transformer, CIFAR-10, AdamW",
        VisionTransformer,
        images("cifar10"),
        torch.optim.AdamW,
        {"lr": 1e-3, "weight_decay": 0.05},
        batch_size=128,
        branches=BRANCHES,
        warm_up=200,
        shift=True,
        flip=True,
    ),
    "gpt2": ForecastTask(
        "GPT-2 124M, Linux sources, AdamW",
        gpt2,
        linux_sources(1024),
        torch.optim.AdamW,
        {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
        batch_size=32,
        branches={1000: (400,), 1400: (200, 600), 1600: (400,), 1800: (200,)},
        steps=2000,
        warm_up=100,
        evaluated=32,
        around=48,
        large=True,
        clip=1.0,
    ),
}
TASKS["clipped"] = replace(TASKS["mlp"], title="MLP, clipped, MNIST, SGD", clip=0.3)
TASKS["muon"] = replace(
    TASKS["mlp"],
    title="MLP without biases, MNIST, Muon",
    model=lambda tiny: mlp(tiny, bias=False),  # Muon takes matrices alone
    optimizer=torch.optim.Muon,
    settings={"lr": 0.005, "weight_decay": 0.1},
)


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
        fast = {"fused": True} if task.large and self.device.type == "cuda" else {}
        self.optimizer = task.optimizer(self.model.parameters(), **task.settings, **fast)
        self.batch_size = min(task.batch_size, len(data) // 4)
        self.step = 0
        self.loss = torch.compile(self._loss) if fast else self._loss
        self._epoch: tuple[int, Tensor] | None = None
        whole = torch.arange(data.held_out).split(self.batch_size)[: task.evaluated]
        self._held_out_batches = [(i, c) for i, c in enumerate(whole) if len(c) == self.batch_size]

    def train(self, lr: float | None = None, batches: int = 1) -> Tensor:
        """Make one step on one or several batches together; return the loss of the first.

        Args:
            lr: The learning rate; by default the one that the optimizer has.
            batches: Number of batches.
        """
        for group in self.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        self.optimizer.zero_grad()
        losses = []
        for i in range(batches):
            losses.append(self.loss(*self.batch(self.step + i * 1_000_000)))
            (losses[-1] / batches).backward()
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()
        self.step += 1
        return losses[0].detach()

    def constant_lr(self) -> float:
        """Return the learning rate of the trunk at this step."""
        base, warm_up = self.task.settings["lr"], self.task.warm_up
        return base * min(1.0, (self.step + 1) / warm_up) if warm_up else base

    def again(self) -> Tensor:
        """Return the loss on the batch of the last step."""
        return self.loss(*self.batch(self.step - 1))

    def coming(self) -> list[float]:
        """Return the loss on each of the batches of the next steps, as the optimizer would see it.

        That is with the statistics of each batch behind BatchNorm.
        """
        steps = range(self.step, self.step + self.task.evaluated)
        return self._losses([self.batch(step) for step in steps])

    def held_out(self, every: int = 1, offset: int = 0) -> float:
        """Return the loss on one in so many of the batches of held-out examples."""
        found = self._held_out_batches[offset % every :: every]
        losses = self._losses([self._augmented(chosen, i) for i, chosen in found])
        return sum(losses) / len(losses)

    def save(self) -> dict[str, Any]:
        """Return copies of everything that training changes."""
        state = self.optimizer.state_dict()
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": state}) | {
            "step": self.step
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Return to what `save` returned."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # it copies no tensor
        self.step = saved["step"]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the examples of a step."""
        per_epoch = len(self.data) // self.batch_size
        epoch, place = divmod(step, per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(7_919 * self.seed + epoch)
            self._epoch = epoch, torch.randperm(len(self.data), generator=generator)
        chosen = self._epoch[1][place * self.batch_size :][: self.batch_size]
        return self._augmented(self.data.held_out + chosen, 1_000_003 * self.seed + step)

    @torch.no_grad()
    def _losses(self, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
        buffers = [b.clone() for b in self.model.buffers()]
        losses = [self.loss(*batch).double() for batch in batches]
        for b, saved in zip(self.model.buffers(), buffers, strict=True):
            b.copy_(saved)
        return torch.stack(losses).tolist()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.task.large):
            return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())

    def _augmented(self, chosen: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.data.batch(chosen.to(self.device))
        generator = torch.Generator().manual_seed(seed)
        if self.task.flip:
            inputs = flipped(inputs, generator)
        return shifted(inputs, generator) if self.task.shift else inputs, targets
