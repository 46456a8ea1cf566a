"""A small task for Lightning's Trainer whose batches depend on nothing but their number."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, DistributedSampler


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


def loader(batch_size: int = 16) -> DataLoader:
    """Batches whose order depends on the epoch alone, so that a resumed run sees the same."""
    data = Noise()
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=1)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


class Task(LightningModule):
    """A small network, with SGD and no scheduler of its own."""

    def __init__(self, warm_up=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.warm_up = warm_up

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5, weight_decay=0.05)
        if self.warm_up is None:
            return optimizer
        config = {"scheduler": self.warm_up(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Notes(Callback):
    """Writes down learning rate and decision after every batch, and may crash at a step."""

    def __init__(self, fdr, crash_at: int | None = None) -> None:
        self.fdr = fdr
        self.crash_at = crash_at
        self.rows: dict[int, tuple] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        decisions = [scheduler.last_decision for scheduler in self.fdr.schedulers]
        self.rows[trainer.global_step] = lr, decisions
        if trainer.global_step == self.crash_at:
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
