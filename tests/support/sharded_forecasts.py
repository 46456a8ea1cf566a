"""Forecasts of distributed networks, which the tests compare between processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import equilibrate as eq
from equilibrate.integrations._attached import Attached, Plan
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


def open_intervals(strategy, steps):
    """Lengths of the open intervals of a monitor: before, inside and after averaged parameters."""
    model = STRATEGIES[strategy](network())
    optimizer = optimizer_for(model, "momentum")
    forecaster, monitor = eq.Forecaster(optimizer, [16], every=4), eq.Monitor(optimizer, every=4)
    parts = parallel_of_data(strategy)
    part = dist.get_rank() * parts // dist.get_world_size()
    train(model, optimizer, steps, parts=parts, part=part)

    def lengths():
        return [probe["open"] for probe in monitor.state_dict()["probes"]]

    found = [lengths()]
    with forecaster.averaged():
        found.append(lengths())
    return [*found, lengths()]


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


def saved_by_one():
    """Losses of a run that continues with the state of one process, next to those without it."""

    def run(*, resumes):
        def make():
            optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
            plan = Plan({"rule": eq.rules.Gain(), "every": 1, "min_steps": 4}, interval="step")
            return optimizer, Attached(optimizer, plan, start=0, named_parameters=())

        optimizer, attached = make()
        for step in range(20):
            if resumes and step == 11:
                states = [(optimizer.state_dict(), attached.state_dict())]
                dist.broadcast_object_list(states, src=0)
                optimizer, attached = make()
                optimizer.load_state_dict(states[0][0])
                attached.load_state_dict(states[0][1])
            (theta,) = optimizer.param_groups[0]["params"]
            theta.grad = torch.full((3,), 0.01)
            optimizer.step()
            attached.add_loss(torch.tensor(float(step * dist.get_rank())))
            if step % 3 == 2:  # so that some losses have not been handed over when it is saved
                attached.advance(epoch_ended=False)
        attached.scheduler.share_losses()
        return attached.scheduler.state_dict()["losses"]

    return run(resumes=False), run(resumes=True)
