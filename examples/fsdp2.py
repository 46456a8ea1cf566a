"""Sharded parameters (FSDP2), with a checkpoint that any number of processes can resume from.

torchrun --nproc-per-node 2 examples/fsdp2.py
torchrun --nproc-per-node 1 examples/fsdp2.py --epochs 15 --resume
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import equilibrate as eq


def train(epochs, folder, resume=False):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # small operations are faster so
    torch.manual_seed(0)
    inputs = torch.randn(4096, 20)
    labels = (inputs[:, :10].square().sum(1) > inputs[:, 10:].square().sum(1)).long()
    labels = torch.where(torch.rand(4096) < 0.1, 1 - labels, labels)

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))  # before the optimizer is created
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    scheduler = eq.FDRScheduler(optimizer, threshold=0.05, factor=0.5)

    def state():
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler, "epoch": 0}

    done = 0
    if resume:
        saved = state()
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        done = saved["epoch"]
    for epoch in range(done + 1, epochs + 1):
        order = torch.randperm(4096, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(32):
            mine = batch[rank::size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[mine]), labels[mine]).backward()
            optimizer.step()
        scheduler.step()  # on every process
        if rank == 0:
            print(f"epoch {epoch:2}  lr {scheduler.last_decision.lr:g}  ", end="")
            print(scheduler.last_decision.reason)
    dcp.save(state() | {"epoch": epochs}, checkpoint_id=folder)  # on every process
    return scheduler.last_decision


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="fsdp2_checkpoint")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.epochs, args.folder, args.resume)
    dist.barrier()  # no process leaves while another one still saves
    dist.destroy_process_group()
