"""Data parallelism: every process decides by itself, and all of them decide the same.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import equilibrate as eq


def train(epochs):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # small operations are faster so
    torch.manual_seed(0)
    inputs = torch.randn(4096, 20)
    labels = (inputs[:, :10].square().sum(1) > inputs[:, 10:].square().sum(1)).long()
    labels = torch.where(torch.rand(4096) < 0.1, 1 - labels, labels)

    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    scheduler = eq.FDRScheduler(optimizer, threshold=0.05, factor=0.5)
    for epoch in range(1, epochs + 1):
        order = torch.randperm(4096, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(32):
            mine = batch[rank::size]  # each process has its own part of the batch
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[mine]), labels[mine]).backward()
            optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch:2}  lr {scheduler.last_decision.lr:g}  ", end="")
            print(scheduler.last_decision.reason)
    return scheduler.last_decision


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.epochs)
    dist.barrier()  # no process leaves before the others are done
    dist.destroy_process_group()
