"""A small task for Lightning's Trainer whose batches depend on nothing but their number."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from equilibrate.integrations.lightning import CooldownCallback, MonitorCallback
from support.leaving import leave


class Noise(Dataset):
    """Inputs and targets of a noisy linear map."""

    def __init__(self, size: int = 640) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(size, 5, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True)
        self.targets += torch.randn(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[i], self.targets[i]


def loader(replicas: int = 1, rank: int = 0) -> DataLoader:
    """Batches whose order depends on the epoch alone, so that a resumed run sees the same."""
    data = Noise()
    sampler = DistributedSampler(data, num_replicas=replicas, rank=rank, seed=1)
    return DataLoader(data, batch_size=16 // replicas, sampler=sampler)


class Both(LightningDataModule):
    """The same batches for training and for validation."""

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return DataLoader(Noise(), batch_size=64)


class Task(LightningModule):
    """A small network, with SGD and no scheduler of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5, weight_decay=0.05)


class Notes(Callback):
    """Writes down learning rate and decision before every batch, and may crash at a step."""

    def __init__(self, callback, crash_at: int | None = None, *, kill: bool = False) -> None:
        self.callback = callback
        self.crash_at = crash_at
        self.kill = kill
        self.rows: dict[int, tuple] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        decision = getattr(self.callback.scheduler, "last_decision", None)
        self.rows[trainer.global_step] = lr, decision
        if trainer.global_step == self.crash_at:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("crash")


def fit(task, callbacks, folder, *, epochs=8, ckpt_path=None, data=None, **options):
    """Train, with as little around it as Lightning allows."""
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": epochs,
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "num_sanity_val_steps": 0,
    }
    trainer = Trainer(callbacks=callbacks, **(settings | options))
    trainer.fit(task, data or loader(), ckpt_path=ckpt_path)
    return trainer


def main(mode: str, folder: str) -> None:
    """Train as one of two processes: all at once, until it is killed, or from a checkpoint."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    task, callback, watching = Task(), CooldownCallback(), MonitorCallback(forecast=True)
    notes = Notes(callback, 255 if mode == "killed" and rank == 0 else None, kill=True)
    checkpoint = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_epochs=1)
    fit(
        task,
        [callback, watching, notes, checkpoint],
        folder,
        epochs=10,
        ckpt_path=f"{folder}/step=240.ckpt" if mode == "resumed" else None,
        data=loader(2, rank),
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        enable_checkpointing=True,
    )
    weights = [p.detach() for p in task.parameters()]
    rows = {step: str(row) for step, row in notes.rows.items()}
    watching.forecaster.share_losses()
    compared = watching.forecaster.state_dict()["comparisons"]["values"]
    torch.save((weights, rows, compared), Path(folder, f"{mode}-{rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
