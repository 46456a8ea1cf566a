"""Train one model with the adaptive schedule, record each epoch, and resume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from equilibrate.runlog import records
from equilibrate.runlog.lock import lock
from equilibrate.scheduler import FDRScheduler
from equilibrate_paper.data import datasets
from equilibrate_paper.protocol import models
from equilibrate_paper.runs import checkpoints
from equilibrate_paper.runs.errors import Diverged

TASKS = {"digits-mlp": "digits", "digits-cnn": "digits", "mlp": "mnist", "cnn": "cifar10"}
"""The data set (`datasets.load`) of each task. A task is named after its model (`models.build`)."""


def limit_threads(task: str) -> None:
    """Use one CPU thread for the digits, whose models are too small for several threads.

    Args:
        task: The name of the task.
    """
    if TASKS.get(task) == "digits":
        torch.set_num_threads(1)


@dataclass(frozen=True)
class Settings:
    """The settings of a training run. The defaults suit the digits.

    Raises:
        ValueError: If a setting has an invalid value.
    """

    task: str = "digits-mlp"
    """One of `TASKS`."""
    epochs: int = 100
    """Number of epochs."""
    lr: float = 0.2
    """Initial learning rate η."""
    momentum: float = 0.0
    """Momentum μ."""
    weight_decay: float = 0.01
    """Coefficient λ of the L2 term."""
    batch_size: int = 10
    """Number of examples in a batch."""
    threshold: float = 0.01
    """The learning rate is lowered if |L/R − 1| is below this value."""
    factor: float = 0.9
    """The new learning rate is `factor` times the old one."""
    seed: int = 0
    """Seed of the initial weights and of the shuffling."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        for name in ("epochs", "lr", "batch_size"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {self.weight_decay}")


def train(
    settings: Settings,
    out: Path,
    *,
    mode: Literal["new", "resume", "overwrite"] = "new",
    data_dir: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Train a model and record each epoch in `out/train.jsonl`.

    With `mode="resume"` an interrupted run continues from `out/checkpoint.pt` and ends with the
    same rows as an uninterrupted run. A run may be resumed with more epochs than before.

    Args:
        settings: The settings of the run.
        out: The folder for the record and the checkpoint.
        mode: Whether to start a new run, resume an interrupted one, or overwrite it.
        data_dir: The folder with MNIST and CIFAR-10.

    Yields:
        The row of each epoch, after it is recorded.

    Raises:
        Diverged: If the loss is no longer finite. The last row shows it.
        ValueError: If a run is resumed with fewer epochs than it has.
    """
    dataset = datasets.load(TASKS[settings.task], data_dir, progress=True)
    run, checkpoint = _Run(settings, dataset), out / "checkpoint.pt"
    state = checkpoints.load(checkpoint) if mode == "resume" else None
    config = {**asdict(settings), "data": dataset.fingerprint}
    keep = state["rows"] if state else 0
    if keep > settings.epochs:
        raise ValueError(
            f"epochs={settings.epochs} is less than the {keep} epochs that {out} has: resume it "
            "with more epochs, or overwrite it"
        )
    with (
        lock(out),
        records.Writer(
            out / "train.jsonl", config=config, mode=mode, keep=keep, may_change=("epochs",)
        ) as writer,
    ):
        if state:
            run.load_state_dict(state["run"])
        else:  # a checkpoint of an earlier record must not be used after a kill
            checkpoints.remove(checkpoint)
        while run.epoch < settings.epochs:
            row = run.advance()
            writer.write(row)
            writer.sync()
            checkpoints.save(checkpoint, {"run": run.state_dict(), "rows": writer.count})
            yield row
            if not math.isfinite(row["loss"]):
                raise Diverged(
                    f"SGD diverged in epoch {run.epoch}: the loss is {row['loss']}. The epochs so "
                    f"far are in {writer.path}: use a smaller learning rate than {settings.lr:g}, "
                    "and --overwrite"
                )
        writer.end()


class _Run:
    """A usual training loop with an FDRScheduler."""

    def __init__(self, settings: Settings, dataset: datasets.Dataset) -> None:
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
            self.optimizer,
            threshold=settings.threshold,
            factor=settings.factor,
            every=1,  # as in the paper: every step is measured, and a decision needs no minimum
            min_steps=1,
        )

    def advance(self) -> dict[str, Any]:
        """Return the row to record, after training for one epoch."""
        inputs, targets = self.dataset.train
        order = torch.randperm(len(inputs), generator=self.generator)
        batches = order.split(self.settings.batch_size)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(inputs[batch]), targets[batch])
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
            "next_lr": decision.lr,
            "lowered": decision.lowered,
            "reason": decision.reason,
            "train_accuracy": self._accuracy(inputs, targets),
            "test_accuracy": self._accuracy(*self.dataset.test),
        }

    @torch.no_grad()
    def _accuracy(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        chunks = zip(inputs.split(1000), targets.split(1000), strict=True)
        correct = sum(int((self.model(x).argmax(1) == y).sum()) for x, y in chunks)
        return correct / len(targets)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loop."""
        return {
            "epoch": self.epoch,
            "generator": self.generator.get_state(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.epoch = state["epoch"]
        self.generator.set_state(state["generator"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
