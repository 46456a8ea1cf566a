"""Train one model with the adaptive schedule, record each epoch, and resume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import equilibrate as eq
from equilibrate.record import jsonl
from equilibrate_paper.data import datasets
from equilibrate_paper.protocol import models
from equilibrate_paper.runs.errors import Diverged
from equilibrate_paper.runs.folder import load_checkpoint, save_checkpoint

TASKS = {"digits-mlp": "digits", "digits-cnn": "digits", "mlp": "mnist", "cnn": "cifar10"}
"""The data set (`datasets.load`) of each task. A task is named after its model (`models.build`)."""
_LARGEST = 2**63
"""Torch takes smaller whole numbers."""


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
        for name in ("epochs", "batch_size", "seed"):
            if abs(getattr(self, name)) >= _LARGEST:
                raise ValueError(f"{name} must be below 2⁶³, got {getattr(self, name)}")


def train(
    settings: Settings,
    out: Path,
    *,
    mode: Literal["new", "resume", "overwrite"] = "new",
    data_dir: Path | None = None,
) -> Iterator[tuple[int, str]]:
    """Train a model and record each epoch in `out/train.jsonl` with an `eq.Recorder`.

    With `mode="resume"` an interrupted run continues from `out/checkpoint.pt` and ends with the
    same rows as an uninterrupted run, except for their times. A run may be resumed with more
    epochs than before.

    Args:
        settings: The settings of the run.
        out: The folder for the record and the checkpoint.
        mode: Whether to start a new run, resume an interrupted one, or overwrite it.
        data_dir: The folder with MNIST and CIFAR-10.

    Yields:
        The number of completed epochs and how it goes, after each epoch.

    Raises:
        Diverged: If the loss is no longer finite. The last row shows it.
    """
    if TASKS[settings.task] == "digits":
        torch.set_num_threads(1)  # these models are too small for several threads
    data = datasets.load(TASKS[settings.task], data_dir, progress=True)
    order = torch.Generator().manual_seed(settings.seed)
    model = models.build(settings.task, settings.seed)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    scheduler = eq.FDRScheduler(optimizer, threshold=settings.threshold, factor=settings.factor)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint, done = out / "checkpoint.pt", 0
    config = asdict(settings) | {"data": data.fingerprint}
    del config["epochs"]  # a run may be resumed with more
    if mode == "resume" and (state := load_checkpoint(checkpoint)) is not None:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        order.set_state(state["order"])
        done = state["epoch"]
    with eq.Recorder(out, scheduler, config=config, mode=mode) as recorder:
        if not done:  # a checkpoint of an earlier record must not be used after a kill
            checkpoint.unlink(missing_ok=True)
        for epoch in range(done + 1, settings.epochs + 1):
            loss = _run_epoch(model, optimizer, data.train, order, settings.batch_size)
            scheduler.step()
            accuracies = {
                "train_accuracy": _accuracy(model, *data.train),
                "test_accuracy": _accuracy(model, *data.test),
            }
            recorder.record(loss=loss, epoch=epoch, **accuracies)
            state = {name: part.state_dict() for name, part in parts.items()}
            save_checkpoint(checkpoint, state | {"order": order.get_state(), "epoch": epoch})
            decision = scheduler.last_decision
            yield epoch, f"loss {loss:.3f}  η {decision.lrs[0]:.3g}  {decision.reason}"
            if not math.isfinite(loss):
                raise Diverged(
                    f"SGD diverged in epoch {epoch}: the loss is {loss}. The epochs so far are in "
                    f"{recorder.path}: use a smaller learning rate than {settings.lr:g}, and "
                    "--overwrite"
                )


def summary(out: Path) -> str:
    """Say what a training run has come to.

    Args:
        out: The folder of the run.

    Returns:
        The number of epochs, the learning rate and the test accuracy.
    """
    record = jsonl.read(out / "train.jsonl")
    rates = [record.config["lr"], *(row["lrs"][0] for row in record.rows)]
    lowered = sum(after < before for before, after in pairwise(rates))
    rate = f"lowered {lowered} times, to" if lowered else "not lowered:"
    accuracy = record.rows[-1]["test_accuracy"]
    return (
        f"{len(record.rows)} epochs, learning rate {rate} {rates[-1]:.3g}, "
        f"test accuracy {accuracy:.1%}"
    )


def _run_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    order: torch.Generator,
    batch_size: int,
) -> float:
    """Return the mean loss of the mini-batches of an epoch, after training for it."""
    inputs, targets = data
    batches = torch.randperm(len(inputs), generator=order).split(batch_size)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return float(total) / len(batches)


@torch.no_grad()
def _accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    chunks = zip(inputs.split(1000), targets.split(1000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in chunks) / len(targets)
