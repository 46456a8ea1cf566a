"""Forecasts of distributed networks, which the tests compare between processes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import equilibrate as eq
from support.sharded import (
    STRATEGIES,
    network,
    optimizer_for,
    parallel_of_data,
    train,
    without_collectives,
)


def forecasts(strategy, steps):
    """Forecasts of a distributed model, before and after its state was loaded, and averages."""
    model = STRATEGIES[strategy](network())
    optimizer = optimizer_for(model, "momentum")
    forecaster = eq.Forecaster(optimizer, [4], every=1)
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    parts = parallel_of_data(strategy)
    part = dist.get_rank() * parts // dist.get_world_size()
    train(model, optimizer, steps, parts=parts, part=part, replicated=plain)
    found = forecaster.forecasts()
    state = forecaster.state_dict()
    with forecaster.averaged():
        params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        # A copy: the full tensor of a replicated one is the parameter itself.
        whole = [(p.full_tensor() if isinstance(p, DTensor) else p).clone() for p in params]
    other = eq.Forecaster(optimizer, [4], every=1)
    other.load_state_dict(state)
    return found, other.forecasts(), whole


def single_forecasts(steps):
    """Forecasts of a single process, and its means."""
    model = network()
    optimizer = optimizer_for(model, "momentum")
    forecaster = eq.Forecaster(optimizer, [4], every=1)
    train(model, optimizer, steps)
    return forecaster.forecasts(), forecaster.state_dict()["means"][0]


def data_parallel_losses(steps):
    """Forecasts of data parallel processes, without collectives, and losses that are averaged."""
    wrapped = DistributedDataParallel(network())
    optimizer = optimizer_for(wrapped.module, "momentum")
    forecaster = eq.Forecaster(optimizer, [4], every=1)
    scheduler = eq.FDRScheduler(
        optimizer, rule=eq.rules.Gain(), forecaster=forecaster, min_steps=1, every=None
    )
    train(wrapped, optimizer, steps, parts=4, part=dist.get_rank())
    found = without_collectives(forecaster.forecasts)
    scheduler.step(float(dist.get_rank()))
    return found, scheduler.last_decision.reading.losses
