"""The smallest model of torchtitan, trained by its Trainer on CPUs."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

from support.leaving import leave

# torchtitan asks for an accelerator. These are the functions of torch.cuda that it calls.
CPU = SimpleNamespace(
    set_device=lambda device: None,
    get_device_name=lambda device=None: "CPU",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda device=None: None,
    empty_cache=lambda: None,
    current_device=lambda: 0,
    synchronize=lambda device=None: None,
)
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: CPU  # pyright: ignore[reportAttributeAccessIssue]

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from equilibrate.integrations.torchtitan import build_lr_schedulers  # noqa: E402


class Batches(BaseDataLoader):
    """Sequences of tokens that depend on the rank and the number of the batch alone."""

    def __init__(self, dp_rank: int, job_config) -> None:
        self.rank = dp_rank
        self.shape = job_config.training.local_batch_size, job_config.training.seq_len + 1
        self.number = 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(1000 * self.rank + self.number)
            tokens = torch.randint(64, self.shape, generator=generator)
            self.number += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state_dict):
        self.number = state_dict["number"]


def parallelize(model, *args):
    """Shard as torchtitan does, with sums only: gloo cannot scale what it reduces."""
    model = get_train_spec("llama3").parallelize_fn(model, *args)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def main(mode: str, folder: str) -> None:
    """Train all at once, until it is killed, or from the checkpoint that is found."""
    torch.set_num_threads(1)
    spec = replace(
        get_train_spec("llama3"),
        parallelize_fn=parallelize,
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda dp_rank, job_config, **_: Batches(dp_rank, job_config),
        build_lr_schedulers_fn=build_lr_schedulers(threshold=1e9, factor=0.5, min_steps=8, every=2),
    )
    register_train_spec("llama3_fdr", spec)
    options = {
        "model.name": "llama3_fdr",
        "model.flavor": "debugmodel",
        "job.dump_folder": f"{folder}/{'straight' if mode == 'straight' else 'killed'}",
        "training.steps": 40,
        "debug.seed": 0,
        "training.local_batch_size": 2,
        "training.seq_len": 16,
        "optimizer.lr": 1e-3,
        "lr_scheduler.warmup_steps": 5,
        "lr_scheduler.decay_ratio": 0,
        "metrics.log_freq": 1,
        "checkpoint.interval": 20,
        "activation_checkpoint.mode": "none",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    config = ConfigManager().parse_args([*arguments, "--checkpoint.enable"])
    trainer = Trainer(config)
    lrs, decisions = [], []
    step = trainer.lr_schedulers.step

    def noting_step():
        if mode == "killed" and trainer.step == 27:
            os.kill(os.getpid(), signal.SIGKILL)
        lrs.append(trainer.optimizers.optimizers[0].param_groups[0]["lr"])
        step()
        decisions.append(str(trainer.lr_schedulers._attached.scheduler.last_decision))

    trainer.lr_schedulers.step = noting_step
    trainer.train()
    weights = [p.full_tensor() for part in trainer.model_parts for p in part.parameters()]
    rank = torch.distributed.get_rank()
    torch.save((weights, lrs, decisions), Path(folder, f"{mode}-{rank}.pt"))
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
