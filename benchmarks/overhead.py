"""What a monitored training step costs, against a bare one and against other ways of watching.

All variants train the same model on the same random batches, one thread, interleaved. A round is
`burst` steps of each. The clock is the thread's own CPU time (what other processes do on the
machine counts less); wall-clock ratios stand beside it.

    python benchmarks/overhead.py [--workload NAME ...] [--rounds N] [--out FILE]

Rows of a table:
    bare, again         two identical bare loops: their ratio is the noise
    Monitor             `equilibrate.Monitor(optimizer)` attached, nothing else changed
    naive .item()       what one would write first: products summed and read at each step
    published rule      the paper's rule word for word: own velocity, Python numbers, lists
    SASA                the complete step of statopt's optimizer (`pip install statopt`), which
                        tests for stationarity by two such products
    fused               SGD(fused=True) without and with a monitor
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from harness import command, compare, interleave, markdown
from torch import Tensor, nn

import equilibrate as eq
from equilibrate.paper.protocol.models import build

BATCHES = 16
STEPS_AN_EPOCH = 600


class Block(nn.Module):
    """Two 3×3 convolutions around which the input is carried."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.carry = (
            nn.Identity()
            if channels == outputs and stride == 1
            else nn.Sequential(
                nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.carry(x))


def resnet18() -> nn.Sequential:
    """The 11-million-parameter ResNet-18 for 32×32 images: a 3×3 stem and no first pooling."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    ]
    channels = 64
    for outputs, stride in [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)]:
        layers.append(Block(channels, outputs, stride))
        channels = outputs
    layers += [Block(512, 512, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Workload:
    """A model, its batches and its SGD."""

    name: str
    model: Callable[[], nn.Module]
    image: tuple[int, int, int]
    batch: int
    sgd: dict[str, Any]
    rounds: int
    burst: int


MLP = Workload(
    "MLP 784-200-200-10",
    lambda: build("mlp", seed=0),
    (1, 28, 28),
    100,
    {"lr": 0.1, "weight_decay": 0.01},
    rounds=30,
    burst=128,
)
WORKLOADS = {
    "mlp": MLP,
    "mlp-plain": replace(MLP, sgd={"lr": 0.1}),
    "mlp-momentum": replace(MLP, sgd={"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9}),
    "cnn": Workload(
        "the paper's CNN",
        lambda: build("cnn", seed=0),
        (3, 32, 32),
        100,
        {"lr": 0.1, "weight_decay": 0.01},
        rounds=30,
        burst=4,
    ),
    "resnet18": Workload(
        "ResNet-18",
        resnet18,
        (3, 32, 32),
        16,
        {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9},
        rounds=10,
        burst=1,
    ),
}


@dataclass(frozen=True)
class Seconds:
    """A step's wall-clock time, its CPU time, and that part of it that follows the gradients."""

    wall: float
    cpu: float
    update: float


class Bare:
    """A training loop; subclasses watch it."""

    fused: bool | None = None

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.model = workload.model()
        self.params = list(self.model.parameters())
        self.optimizer = self.make_optimizer()
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (
                torch.randn(workload.batch, *workload.image, generator=generator),
                torch.randint(10, (workload.batch,), generator=generator),
            )
            for _ in range(BATCHES)
        ]
        self.steps = 0

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.params, **self.workload.sgd, fused=self.fused)

    def compute_gradients(self) -> None:
        x, y = self.batches[self.steps % BATCHES]
        self.steps += 1
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()

    def update(self) -> None:
        self.optimizer.step()

    def measure(self) -> Seconds:
        self.compute_gradients()  # not timed: brings this variant's own data into the caches
        self.update()
        update, cpu, wall = 0.0, time.thread_time(), time.perf_counter()
        for _ in range(self.workload.burst):
            self.compute_gradients()
            start = time.thread_time()
            self.update()
            update += time.thread_time() - start
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        return Seconds(*(t / self.workload.burst for t in (wall, cpu, update)))

    def sides(self) -> tuple[float, float] | None:
        """Both sides of FDR1 over the half-running window, where they are watched."""
        return None


class Monitored(Bare):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.monitor = eq.Monitor(self.optimizer)

    def sides(self) -> tuple[float, float]:
        reading = self.monitor.reading()
        return reading.left, reading.right


class Listed(Bare):
    """Keeps both sides of each step as numbers in lists."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.lr = workload.sgd["lr"]
        self.momentum = workload.sgd.get("momentum", 0.0)
        self.decay = workload.sgd.get("weight_decay", 0.0)
        self.lefts: list[float] = []
        self.rights: list[float] = []

    def sides(self) -> tuple[float, float]:
        return half_running_mean(self.lefts), half_running_mean(self.rights)


class Naive(Listed):
    def update(self) -> None:
        left = right = 0.0
        with torch.no_grad():
            for p in self.params:
                gradient = p.grad
                assert gradient is not None
                if self.decay:
                    gradient = gradient + self.decay * p
                left += (p * gradient).sum().item()
                if not self.momentum:
                    right += gradient.pow(2).sum().item()
            self.optimizer.step()
            if self.momentum:
                for p in self.params:
                    right += self.optimizer.state[p]["momentum_buffer"].pow(2).sum().item()
        self.lefts.append(left)
        self.rights.append((1 + self.momentum) / 2 * self.lr * right)


class PublishedRule(Listed):
    """v ← μv − (1−ν)g; O_L = θ·g, O_R = (1+μ)/(2(1−ν)) ηv²; |Ō_L/Ō_R − 1| < X at epochs' ends."""

    tolerance, dampening = 0.01, 0.0

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.velocities = [torch.zeros_like(p) for p in self.params]
        self.stationary: list[bool] = []

    def update(self) -> None:
        left = right = 0.0
        with torch.no_grad():
            for p, v in zip(self.params, self.velocities, strict=True):
                assert p.grad is not None
                gradient = p.grad + self.decay * p
                v.mul_(self.momentum).sub_((1 - self.dampening) * gradient)
                left += float(torch.sum(p * gradient))
                right += float(torch.sum(v * v))
        self.optimizer.step()
        self.lefts.append(left)
        coefficient = (1 + self.momentum) / (2 * (1 - self.dampening))
        self.rights.append(coefficient * self.lr * right)
        if self.steps % STEPS_AN_EPOCH == 0:
            left, right = self.sides()
            # The learning rate stays, so that all variants go on doing the same.
            self.stationary.append(abs(left / right - 1) < self.tolerance)


class SASA(Bare):
    def make_optimizer(self) -> torch.optim.Optimizer:
        import statopt  # pyright: ignore[reportMissingImports]

        return statopt.SASA(self.params, **self.workload.sgd)


class BareFused(Bare):
    fused = True


class MonitoredFused(Monitored):
    fused = True


def half_running_mean(values: list[float]) -> float:
    return fmean(values[len(values) // 2 :])


VARIANTS: dict[str, type[Bare]] = {
    "bare": Bare,
    "again": Bare,
    "Monitor": Monitored,
    "naive .item()": Naive,
    "published rule": PublishedRule,
    "SASA": SASA,
    "bare, fused": BareFused,
    "Monitor, fused": MonitoredFused,
}


def run(workload: Workload) -> dict[str, Any]:
    """Measure one workload; check that all who watch it read the same."""
    skipped = {} if find_spec("statopt") else {"SASA": "statopt is not installed"}
    loops = {name: kind(workload) for name, kind in VARIANTS.items() if name not in skipped}
    rounds = interleave({name: loop.measure for name, loop in loops.items()}, workload.rounds)
    expected = loops["Monitor"].sides() or (math.nan, math.nan)
    for name in ("naive .item()", "published rule"):
        sides = loops[name].sides() or (math.nan, math.nan)
        if not all(math.isclose(*pair, rel_tol=1e-3) for pair in zip(sides, expected, strict=True)):
            raise RuntimeError(f"{name} reads {sides}, Monitor {expected}: one of them is wrong")
    bare = rounds["bare"]
    bare_cpu = [t.cpu for t in bare]
    return {
        "workload": workload.name,
        "parameters": sum(p.numel() for p in loops["bare"].params),
        "batch": workload.batch,
        "sgd": workload.sgd,
        "rounds": workload.rounds,
        "steps_a_round": workload.burst,
        "skipped": skipped,
        "variants": {
            name: {
                "cpu": compare([t.cpu for t in times], bare_cpu),
                "wall": compare([t.wall for t in times], [t.wall for t in bare]),
                # The rest of the step is the same for all, so its noise can be left out.
                "update": compare(
                    [b.cpu + t.update - b.update for t, b in zip(times, bare, strict=True)],
                    bare_cpu,
                ),
                "update_seconds": compare([t.update for t in times], [t.update for t in bare]),
            }
            for name, times in rounds.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """One workload as a table of Markdown."""
    measured = [
        [
            name,
            row["cpu"].in_milliseconds(),
            f"{1e6 * row['update_seconds'].median:.0f}",
            *(row[ratio].as_ratio(4) for ratio in ("update", "cpu", "wall")),
        ]
        for name, row in result["variants"].items()
    ]
    skipped = [[name, f"skipped: {why}", *[""] * 4] for name, why in result["skipped"].items()]
    return markdown(
        result["workload"],
        result,
        f"{result['parameters']:,} parameters, batch {result['batch']}",
        ["CPU ms a step (quartiles)", "update µs", "ratio by update", "ratio, CPU", "ratio, wall"],
        measured + skipped,
    )


if __name__ == "__main__":
    command(__file__, __doc__, WORKLOADS, run, table)
