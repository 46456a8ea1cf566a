"""Forecasts of distributed networks, which the tests compare between processes."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

import equilibrate as eq
from equilibrate.forecast.losses import Losses
from support.sharded import (
    STRATEGIES,
    mesh,
    network,
    numbers,
    optimizer_for,
    parallel_of_data,
    train,
    without_collectives,
)

HORIZON = 10


def part_of(strategy):
    """Which part of each batch this process trains on."""
    parts = parallel_of_data(strategy)
    return {"parts": parts, "part": dist.get_rank() * parts // dist.get_world_size()}


def told(forecaster, rank=1.5):
    """Return what hands a loss over after each step: it falls, and differs between processes.

    That of rank 1.5 is the mean of four processes.
    """

    def after_step():
        step = forecaster.step
        forecaster.update(3 - 0.01 * step + 0.05 * (step % 3) * rank, lambda: 2.8)

    return after_step


def forecasts(strategy, steps):
    """Forecasts of a distributed model, before and after its state was loaded, and averages."""
    model = STRATEGIES[strategy](network())
    optimizer = optimizer_for(model, "momentum")
    forecaster = eq.Forecaster(optimizer, model, every=1)
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    train(
        model,
        optimizer,
        steps,
        replicated=plain,
        after_step=told(forecaster, dist.get_rank()),
        **part_of(strategy),
    )
    found = forecaster.forecast(HORIZON)
    with forecaster.averaged():
        params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        # A copy: the full tensor of a replicated one is the parameter itself.
        whole = [(p.full_tensor() if isinstance(p, DTensor) else p).clone() for p in params]
    other = eq.Forecaster(optimizer, every=1)
    other.load_state_dict(forecaster.state_dict())
    return found, other.forecast(HORIZON), whole


def single_forecasts(steps):
    """Forecasts of a single process, and its averages."""
    model = network()
    optimizer = optimizer_for(model, "momentum")
    forecaster = eq.Forecaster(optimizer, every=1)
    train(model, optimizer, steps, after_step=told(forecaster))
    with forecaster.averaged():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return forecaster.forecast(HORIZON), [p.detach().clone() for p in params]


def averaged_in_mid_interval(strategy, steps):
    """Readings of a run whose averages were evaluated, and of one without."""

    def run(*, averages):
        model = STRATEGIES[strategy](network())
        optimizer = optimizer_for(model, "momentum")
        forecaster = eq.Forecaster(optimizer, model, every=4)
        monitor = eq.Monitor(optimizer, model, every=4)
        for first in range(0, steps, 5):
            train(model, optimizer, 5, first=first, **part_of(strategy))
            if averages:
                with forecaster.averaged():
                    numbers(monitor)
        return numbers(monitor)

    return run(averages=True), run(averages=False)


def evaluated(make, steps, **where):
    """Losses of all evaluations of a run, and the parameters at its end.

    It is watched with a closure, and its own and its averaged parameters are evaluated.
    """
    model = make(network())
    optimizer = optimizer_for(model, "momentum")
    forecaster = eq.Forecaster(optimizer, model, every=1)
    losses = []

    @torch.no_grad()
    def loss():
        inputs = torch.linspace(-1, 1, 8 * 4 * 6, dtype=torch.float64).view(8, 4, 6)
        output = model(inputs)
        output = output.full_tensor() if isinstance(output, DTensor) else output
        losses.append(output.square().mean().item())
        return losses[-1]

    def after_step():
        forecaster.update(loss(), loss)
        if forecaster.step % 30 == 0:
            with forecaster.averaged():
                loss()
            loss()

    plain = [p for p in model.parameters() if not isinstance(p, DTensor)] if where else ()
    train(model, optimizer, steps, replicated=plain, after_step=after_step, **where)
    params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return losses, [(p.full_tensor() if isinstance(p, DTensor) else p) for p in params]


def evaluated_while_sharded(strategy, steps):
    """What `evaluated` returns for a distributed model."""
    return evaluated(STRATEGIES[strategy], steps, **part_of(strategy))


def of_a_dtensor():
    """What is kept of a loss that is a DTensor, of which each process has a part."""
    losses = Losses()
    losses.add(DTensor.from_local(torch.tensor(1.0 + dist.get_rank()), mesh(4), [Partial()]))
    return losses.blocks()[1].tolist()


def without_the_model(steps):
    """The error of a closure if the forecaster does not know the sharded model."""
    model = STRATEGIES["FSDP2"](network())
    optimizer = optimizer_for(model, "momentum")
    forecaster = eq.Forecaster(optimizer, every=1)
    try:
        train(model, optimizer, steps, after_step=told(forecaster), **part_of("FSDP2"))
    except ValueError as error:
        return str(error)
    return None


def data_parallel(steps):
    """Forecasts of data parallel processes, without collectives."""
    wrapped = DistributedDataParallel(network())
    optimizer = optimizer_for(wrapped.module, "momentum")
    forecaster = eq.Forecaster(optimizer, every=1)
    train(
        wrapped,
        optimizer,
        steps,
        parts=4,
        part=dist.get_rank(),
        after_step=told(forecaster),
    )
    return without_collectives(lambda: forecaster.forecast(HORIZON))


def shared_losses(steps):
    """Sums of the losses in the state of each process, after they were shared."""
    theta = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    scheduler = eq.Cooldown(optimizer, total_steps=1000)
    for step in range(steps):
        theta.grad = torch.full((3,), 0.01)
        optimizer.step()
        scheduler.step(torch.tensor(float(step * dist.get_rank())))
    scheduler.share_losses()
    return scheduler.state_dict()["forecaster"]["losses"]["rows"][:steps, 0].tolist()


def decided(handed, steps):
    """Learning rates of a process whose losses are only handed over at some calls.

    Args:
        handed: Whether to hand a loss over, given the rank and the step.
        steps: Length of the training.
    """
    random = torch.Generator().manual_seed(0)  # gradients are the same on all processes
    theta = nn.Parameter(torch.zeros(40))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    scheduler = eq.Cooldown(optimizer, steps)
    rates = []
    with warnings.catch_warnings(action="ignore"):  # of processes without any loss
        for step in range(steps):
            noise = torch.randn(40, generator=random)
            theta.grad = theta.detach() + noise
            loss = 0.5 * theta.detach().square().sum() + noise @ theta.detach()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step(loss if handed(dist.get_rank(), step) else None)
    return rates, scheduler.last_decision.reason


def on_one_rank(rank, step):
    return rank == 1


def in_turns(rank, step):
    return step % 4 == rank


def decided_on_one_rank(steps):
    return decided(on_one_rank, steps)


def decided_in_turns(steps):
    return decided(in_turns, steps)


def told_on_one_rank(what, steps):
    """The error of each process if only one hands over losses of sharded parameters."""
    model = STRATEGIES["FSDP2"](network())
    optimizer = optimizer_for(model, "momentum")
    forecaster = eq.Forecaster(optimizer, model, every=1)

    def after_step():
        if dist.get_rank() == 1:
            forecaster.update(1.0, lambda: 0.5)
        elif what == "closures":
            forecaster.update(1.0)

    train(model, optimizer, steps, after_step=after_step, **part_of("FSDP2"))
    try:
        forecaster.forecast(HORIZON)
    except RuntimeError as error:
        return str(error)
    return None
