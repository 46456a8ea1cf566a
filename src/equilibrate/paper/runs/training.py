"""One model trained with the adaptive schedule, recorded row by row and resumable."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from equilibrate.runlog import checkpoints
from equilibrate.runlog import records
from equilibrate.paper.data import datasets as data
from equilibrate.paper.protocol import models
from equilibrate.scheduler import FDRScheduler

TASKS = {"digits-mlp": "digits", "digits-cnn": "digits", "mlp": "mnist", "cnn": "cifar10"}
"""Each task is a model (`models.build`) and the data set it learns (`data.load`)."""


def spare_threads(task: str) -> None:
    """One thread for the small digits models: their operations only wait for a second one."""
    if TASKS.get(task) == "digits":
        torch.set_num_threads(1)


@dataclass(frozen=True)
class Settings:
    """What is trained and how; the defaults suit the embedded digits."""

    task: str = "digits-mlp"
    epochs: int = 100
    lr: float = 0.2
    momentum: float = 0.0
    weight_decay: float = 0.01
    batch_size: int = 10
    tolerance: float = 0.01
    decrease: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        for name in ("epochs", "lr", "batch_size"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")


def train(
    settings: Settings,
    out: Path,
    *,
    mode: Literal["new", "resume", "overwrite"] = "new",
    data_dir: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Train, yielding a row for each epoch once it is recorded in `out/train.jsonl`.

    A run that was killed goes on from `out/checkpoint.pt` with `mode="resume"`, and ends with the
    same rows as one never stopped.
    """
    dataset = data.load(TASKS[settings.task], data_dir, progress=True)
    run, checkpoint = _Run(settings, dataset), out / "checkpoint.pt"
    state = checkpoints.load(checkpoint) if mode == "resume" else None
    config = {**asdict(settings), "data": dataset.fingerprint}
    keep = state["rows"] if state else 0
    with (
        records.lock(out),
        records.Writer(out / "train.jsonl", config=config, mode=mode, keep=keep) as writer,
    ):
        if state:
            run.load_state_dict(state["run"])
        else:  # what an earlier record left would be taken for this one's after a kill
            checkpoints.remove(checkpoint)
        while run.epoch < settings.epochs:
            row = run.advance()
            writer.write(row)
            writer.sync()
            checkpoints.save(checkpoint, {"run": run.state_dict(), "rows": writer.count})
            yield row


class _Run:
    """The training loop anyone would write, with two lines of equilibrate in it."""

    def __init__(self, settings: Settings, dataset: data.Dataset) -> None:
        self.settings = settings
        self.dataset = dataset
        self.epoch = 0
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.model = models.build(settings.task, settings.seed)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        self.scheduler = FDRScheduler(
            self.optimizer, threshold=settings.tolerance, factor=1 - settings.decrease, every=1, min_steps=1
        )

    def advance(self) -> dict[str, Any]:
        """Train one epoch and say what happened."""
        images, labels = self.dataset.train_images, self.dataset.train_labels
        batches = torch.randperm(len(images), generator=self.generator).split(
            self.settings.batch_size
        )
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(images[batch]), labels[batch])
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        self.scheduler.step()
        self.epoch += 1
        decision = self.scheduler.last_decision
        reading = decision.reading
        return {
            "epoch": self.epoch,
            "step": reading.step,
            "loss": float(total) / len(batches),
            "left": reading.left,
            "right": reading.right,
            "residual": reading.residual,
            "lr": reading.lr,
            "lowered": decision.lowered,
            "reason": decision.reason,
            "train_accuracy": self._accuracy(images, labels),
            "test_accuracy": self._accuracy(self.dataset.test_images, self.dataset.test_labels),
        }

    @torch.no_grad()
    def _accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        chunks = zip(images.split(1000), labels.split(1000), strict=True)
        right = sum(int((self.model(x).argmax(1) == y).sum()) for x, y in chunks)
        return right / len(labels)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "generator": self.generator.get_state(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.generator.set_state(state["generator"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
