"""Small trainings whose state a release writes and every later release must load.

Each case can begin, advance, and say what it has found. `tests/states/make.py` writes the state
in the middle and what was found at the end; a test loads the state and must find the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import equilibrate as eq
from equilibrate.landscape import SweepRun
from equilibrate.paper.runs import training
from equilibrate.runlog import checkpoints, records

FIRST, LAST = 30, 70
"""Steps before the save and in all. With every=4 the save is in the middle of an interval."""
Found = dict[str, list[float]]


class Case(Protocol):
    """A training that can be saved and continued."""

    def advance(self, steps: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def found(self) -> Found: ...


class Loop:
    """Two parameter groups in a noisy quadratic, with whatever watches their optimizer."""

    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer], watch: Any) -> None:
        values = torch.linspace(-1, 1, 12, dtype=torch.float64)
        self.params = [
            nn.Parameter(values[:8].view(4, 2).clone()),
            nn.Parameter(values[8:].clone()),
        ]
        groups = [{"params": [self.params[0]]}, {"params": [self.params[1]], "lr": 0.04}]
        self.optimizer = make_optimizer(groups)
        self.watcher = watch(self.optimizer, dict(zip("ab", self.params, strict=True)))
        self.generator = torch.Generator().manual_seed(0)
        self.step = 0

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            for p in self.params:
                noise = torch.randn(p.shape, generator=self.generator, dtype=p.dtype)
                p.grad = 0.5 * (p.detach() - 1) + noise
            self.optimizer.step()
            self.step += 1
            if isinstance(self.watcher, eq.FDRScheduler) and self.step % 10 == 0:
                squares = [(p.detach() - 1).square().sum().item() for p in self.params]
                self.watcher.step(sum(squares))

    def state_dict(self) -> dict[str, Any]:
        return {
            "params": [p.detach() for p in self.params],
            "optimizer": self.optimizer.state_dict(),
            "watcher": self.watcher.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for p, saved in zip(self.params, state["params"], strict=True):
                p.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.watcher.load_state_dict(state["watcher"])
        self.generator.set_state(state["generator"])
        self.step = state["step"]

    def found(self) -> Found:
        if isinstance(self.watcher, eq.Forecaster):
            return {str(f.horizon): [f.gain.value] for f in self.watcher.forecasts()}
        found = {"lrs": [float(group["lr"]) for group in self.optimizer.param_groups]}
        monitor = self.watcher
        if isinstance(self.watcher, eq.FDRScheduler):
            found["lowered"] = [float(self.watcher.last_decision.lowered)]
            monitor = self.watcher.monitor
        readings = {"model": monitor.reading(), **monitor.group_readings()}
        return found | {
            name: [float(r.step), float(r.count), r.left, r.right] for name, r in readings.items()
        }


class Replicas:
    """Three replicas of a small network."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(40, 3, generator=generator)
        self.ensemble = eq.Ensemble(
            [seeded_model(seed) for seed in range(3)],
            cross_entropy,
            (inputs, torch.arange(40) % 2),
            seeds=range(3),
            lr=[0.1, 0.2, 0.3],
            batch_size=8,
            momentum=0.5,
            weight_decay=0.01,
        )

    def advance(self, steps: int) -> None:
        for _ in range(steps // 10):
            self.ensemble.run_epoch()
            self.ensemble.schedule(threshold=0.5)

    def state_dict(self) -> dict[str, Any]:
        return self.ensemble.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ensemble.load_state_dict(state)

    def found(self) -> Found:
        readings = self.ensemble.readings()
        return {
            "lrs": self.ensemble.lr,
            "left": [reading.left for reading in readings],
            "right": [reading.right for reading in readings],
        }


class Sweeping:
    """A sweep over two learning rates that is interrupted at the second one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(40, 3, generator=generator)
        self.run = SweepRun(
            seeded_model,
            cross_entropy,
            (inputs, torch.arange(40) % 2),
            lrs=[0.1, 0.2],
            seeds=range(2),
            batch_size=8,
            weight_decay=0.1,
            epochs=20,
        )

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            if not self.run.finished:
                self.run.run_epoch()

    def state_dict(self) -> dict[str, Any]:
        return self.run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run.load_state_dict(state)

    def found(self) -> Found:
        points = self.run.result().points
        return {
            f"{name} {i}": list(getattr(point, name))
            for i, point in enumerate(points)
            for name in ("fdr2_left", "noise_trace")
        }


class Folder:
    """The folder of `equilibrate train`, with its record and its checkpoint."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.epochs = 0

    def advance(self, steps: int) -> None:
        self.epochs += steps // 10
        settings = training.Settings(epochs=self.epochs, batch_size=500, threshold=0.5)
        for _ in training.train(settings, self.folder, mode="resume"):
            pass

    def state_dict(self) -> dict[str, Any]:
        names = ("train.jsonl", "checkpoint.pt")
        contents = {name: (self.folder / name).read_bytes() for name in names}
        files = {n: torch.frombuffer(bytearray(c), dtype=torch.uint8) for n, c in contents.items()}
        return {"epochs": self.epochs, "files": files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]
        for name, content in state["files"].items():
            (self.folder / name).write_bytes(content.numpy().tobytes())

    def found(self) -> Found:
        rows = records.read(self.folder / "train.jsonl").rows
        assert checkpoints.load(self.folder / "checkpoint.pt") is not None
        return {name: [row[name] for row in rows] for name in ("epoch", "loss", "left", "right")}


def seeded_model(seed: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        nn.init.uniform_(p, -0.5, 0.5, generator=generator)
    return model


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.6, dampening=0.1, weight_decay=0.05)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)


def scheduler(**options: Any) -> Any:
    settings = {"factor": 0.7, "min_steps": 5, "every": 4} | options
    return lambda optimizer, _: eq.FDRScheduler(optimizer, **settings)


CASES: dict[str, Callable[[], Case]] = {
    "monitor": lambda: Loop(
        sgd, lambda optimizer, named: eq.Monitor(optimizer, every=4, named_parameters=named)
    ),
    "monitor of every step": lambda: Loop(
        adamw, lambda optimizer, _: eq.Monitor(optimizer, every=1)
    ),
    "threshold": lambda: Loop(sgd, scheduler(threshold=0.8)),
    "stationary": lambda: Loop(adamw, scheduler(rule=eq.rules.Stationary())),
    "gain": lambda: Loop(sgd, scheduler(rule=eq.rules.Gain())),
    "forecaster": lambda: Loop(
        sgd, lambda optimizer, _: eq.Forecaster(optimizer, horizons=(16, 32), every=4)
    ),
    "ensemble": Replicas,
    "sweep": Sweeping,
    "folder of a run": Folder,
}


def halfway(name: str) -> Case:
    """Return a case at the moment of the save."""
    case = CASES[name]()
    case.advance(FIRST)
    return case


def finish(case: Case) -> Found:
    """Continue a case to its end, and return what it has found."""
    case.advance(LAST - FIRST)
    return case.found()
