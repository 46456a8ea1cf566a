"""A run that is saved with torch.distributed.checkpoint, and runs that continue from it."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import equilibrate as eq
from support.sharded import STRATEGIES, mesh, network, numbers, optimizer_for, shard_all, train

EPOCH = 5
PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
SAVED, LAST = 3, 6
"""Epochs: with every=4 the state is saved in the middle of an interval."""


def start(model, kind):
    optimizer = optimizer_for(model, kind)
    monitor = eq.Monitor(optimizer, model, every=4)
    scheduler = eq.FDRScheduler(optimizer, threshold=1e9, factor=0.5, min_steps=4, monitor=monitor)
    return optimizer, scheduler


def epochs(model, optimizer, scheduler, first, last, *, parts=1, part=0):
    found = []
    for epoch in range(first, last):
        train(model, optimizer, EPOCH, parts=parts, part=part, first=epoch * EPOCH)
        before = [group["lr"] for group in optimizer.param_groups]
        scheduler.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        found.append((rates < before, rates, numbers(scheduler.monitor)))
    return found


def interrupted(strategy, kind, folder):
    """Train, save, and continue; return the readings at the save and all that comes after it."""
    model = STRATEGIES[strategy](network())
    optimizer, scheduler = start(model, kind)
    parts = 2 if "TP" in strategy else 4
    where = {"parts": parts, "part": dist.get_rank() * parts // 4}
    epochs(model, optimizer, scheduler, 0, SAVED, **where)
    optimizer.zero_grad()
    before = numbers(scheduler.monitor)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    rest = {"model": of_model, "optimizer": of_optimizer}
    dcp.save({**rest, "scheduler": scheduler.state_dict()}, checkpoint_id=f"{folder}/dict")
    dcp.save({**rest, "scheduler": scheduler}, checkpoint_id=f"{folder}/object")
    assert repr(numbers(scheduler.monitor)) == repr(before)
    return before, epochs(model, optimizer, scheduler, SAVED, LAST, **where)


def resumed(kind, folder, form, *, plain=False):
    """Load what `interrupted` has saved, on any number of processes, and continue."""
    model = network()
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if not plain:
        shard_all(model, mesh(size))
    optimizer, scheduler = start(model, kind)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler}
    if form == "dict":
        state["scheduler"] = scheduler.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/{form}")
    if form == "dict":
        scheduler.load_state_dict(state["scheduler"])
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=state["optimizer"])
    loaded = numbers(scheduler.monitor)
    return loaded, epochs(model, optimizer, scheduler, SAVED, LAST, parts=size, part=rank)


def example(folder):
    """Run the example of the documentation, and return what its scheduler's state says then."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    namespace = {"__name__": "example"}
    exec(compile(block, PAGE.name, "exec"), namespace)
    namespace["train"](folder)
    keys = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return sorted(key for key in keys if key.startswith("scheduler.monitor.ledgers"))
