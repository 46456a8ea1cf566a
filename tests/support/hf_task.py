"""A small task for the Trainer of Hugging Face."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from equilibrate.integrations.transformers import CooldownCallback, MonitorCallback
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

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[i], "labels": self.targets[i]}


class Net(torch.nn.Module):
    """A small network that returns its loss, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
        )

    def forward(self, inputs, labels):
        outputs = self.net(inputs)
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}


class Notes(TrainerCallback):
    """Writes down learning rate and decision before every step, and may crash at a step."""

    def __init__(self, callback, crash_at: int | None = None, *, kill: bool = False) -> None:
        self.callback = callback
        self.crash_at = crash_at
        self.kill = kill
        self.rows: dict[int, tuple] = {}

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        decision = getattr(self.callback.scheduler, "last_decision", None)
        self.rows[state.global_step] = optimizer.param_groups[0]["lr"], decision
        if state.global_step == self.crash_at:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("crash")


def make_trainer(
    folder, *, epochs=8, callbacks=None, eval_dataset=None, model=None, kind=Trainer, **options
):
    """Create a trainer with SGD on the small task, with as little around it as it allows."""
    settings = {
        "output_dir": str(folder),
        "num_train_epochs": epochs,
        "per_device_train_batch_size": 16,
        "learning_rate": 0.05,
        "weight_decay": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    return kind(
        model=model or Net(),
        args=TrainingArguments(**(settings | options)),
        train_dataset=Noise(),
        eval_dataset=eval_dataset,
        callbacks=callbacks,
    )


def main(mode: str, folder: str) -> None:
    """Train as one of two processes: all at once, until it is killed, or from a checkpoint."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    output = Path(folder, "straight" if mode == "straight" else "killed")
    options = {"save_strategy": "steps", "save_steps": 48, "ddp_backend": "gloo"}
    callback, watching = CooldownCallback(), MonitorCallback(forecast=True)
    notes = Notes(callback, 255 if mode == "killed" and rank == 0 else None, kill=True)
    options |= {"per_device_train_batch_size": 8, "callbacks": [callback, watching, notes]}
    trainer = make_trainer(output, epochs=10, **options)
    trainer.train(resume_from_checkpoint=True if mode == "resumed" else None)
    weights = [p.detach() for p in trainer.model.parameters()]
    rows = {step: str(row) for step, row in notes.rows.items()}
    watching.forecaster.share_losses()
    compared = watching.forecaster.state_dict()["comparisons"]["values"]
    torch.save((weights, rows, compared), Path(folder, f"{mode}-{rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
