"""A small network, ways to distribute it over processes, and a loop on one global batch.

Everything runs in the processes of `support.processes`. A function returns plain numbers, which
the tests compare between processes and with a single one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import astuple
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import equilibrate as eq
from equilibrate.stationarity import Stationary
from equilibrate.watching import sharding

BATCH = 8
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""The version of torch. Old ones train other parameters than a single process, with or without a
monitor: 2.8 does not add up partial gradients for SGD with momentum, and its FSDP2 on gloo sums
gradients in single precision; 2.8 and 2.9 continue two-dimensional sharding differently."""
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.02}),
    "momentum": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8, "dampening": 0.1, "weight_decay": 0.02},
    ),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02},
    ),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
}


class Network(nn.Module):
    """An attention-free block: tensor parallel layers around a norm on a sharded sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)  # three rows for four processes: one shard is empty

    def forward(self, inputs):
        return self.head(self.norm(self.down(torch.tanh(self.up(inputs)))))


def network(dtype=torch.float64):
    """In double precision, so that readings differ by what a monitor does and not by rounding."""
    torch.manual_seed(0)
    return Network().to(dtype)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore what FSDP1 and ZeroRedundancyOptimizer warn about: deprecation, devices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def mesh(*shape):
    names = ("dp", "tp")[: len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard_all(model, mesh, **kwargs):
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh, **kwargs)
    return model


def tensor_parallel(model, mesh: DeviceMesh, *, sequence=False):
    # With a sharded sequence each process sees some positions: gradients of the norm are partial.
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate()),
        "norm": SequenceParallel(use_local_output=False) if sequence else None,
        "head": RowwiseParallel(input_layouts=Shard(1) if sequence else Replicate()),
    }
    return parallelize_module(model, mesh, {k: v for k, v in plan.items() if v is not None})


def two_dimensional(model):
    both = mesh(2, 2)
    return shard_all(tensor_parallel(model, both["tp"]), both["dp"])


def partly_sharded(model):
    """DTensors next to plain parameters, which are the same on every process."""
    fully_shard(model.up, mesh=mesh(4))
    fully_shard(model.head, mesh=mesh(2, 2))
    return model


STRATEGIES = {
    "FSDP2": lambda model: shard_all(model, mesh(4)),
    "FSDP2, offloaded": lambda model: shard_all(
        model, mesh(4), offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "HSDP": lambda model: shard_all(model, mesh(2, 2)),
    "TP": lambda model: tensor_parallel(model, mesh(4)),
    "TP, sequence": lambda model: tensor_parallel(model, mesh(4), sequence=True),
    "FSDP2 and TP": two_dimensional,
    "FSDP2 in parts": partly_sharded,
}
"""Ways to distribute the network over four processes."""


def parallel_of_data(strategy) -> int:
    """Return the number of parts into which a strategy splits a batch."""
    return {"TP": 1, "TP, sequence": 1, "FSDP2 and TP": 2}.get(strategy, 4)


def groups_of(model):
    """Two parameter groups with different learning rates."""
    named = dict(model.named_parameters())
    last = [p for name, p in named.items() if "head" in name]
    rest = [p for name, p in named.items() if "head" not in name]
    return [{"params": rest}, {"params": last}]


def optimizer_for(model, kind):
    cls, settings = OPTIMIZERS[kind]
    groups = groups_of(model)
    groups[-1]["lr"] = settings["lr"] / 2
    return cls(groups, **settings)


def train(model, optimizer, steps, *, parts=1, part=0, first=0, replicated=(), after_step=None):
    """Train on one part of each global batch; gradients of all parts have the same mean."""
    dtype = next(model.parameters()).dtype
    for t in range(first, first + steps):
        generator = torch.Generator().manual_seed(t)
        inputs = torch.randn(BATCH, 4, 6, generator=generator).to(dtype)
        targets = torch.randint(3, (BATCH, 4), generator=generator)
        size = BATCH // parts
        chosen = slice(part * size, (part + 1) * size)
        optimizer.zero_grad()
        output = model(inputs[chosen])
        output = output.full_tensor() if isinstance(output, DTensor) else output
        nn.functional.cross_entropy(output.flatten(0, 1), targets[chosen].flatten()).backward()
        for p in replicated:  # what DistributedDataParallel would do
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        if after_step:
            after_step()


def numbers(monitor):
    """Return all that a monitor reads, as plain tuples by name."""
    read = monitor.read()
    found = {"model": read.whole, **read.groups}
    found |= {layer.name: layer.reading for layer in read.layers().layers}
    return {name: plain(reading) for name, reading in found.items()}


def plain(reading):
    """Return the numbers of a reading."""
    averages = reading.step, reading.count, reading.left, reading.right, reading.lr
    return (*averages, reading.stderr, reading.margin)


def monitors(model, optimizer, intervals):
    """Monitors of one in k steps, for some k, which do not know of each other."""
    return {k: eq.Monitor(optimizer, model, every=k) for k in intervals}


def single(kind, steps, dtype=torch.float64, intervals=(1, 4)):
    """What a single process reads, which sharded ones are compared with."""
    model = network(dtype)
    optimizer = optimizer_for(model, kind)
    watching = monitors(model, optimizer, intervals)
    train(model, optimizer, steps)
    return {(kind, every): numbers(monitor) for every, monitor in watching.items()}


def single_group(kind, every, steps):
    """What a single process reads with all parameters in one group."""
    model = network()
    cls, settings = OPTIMIZERS[kind]
    optimizer = cls(model.parameters(), **settings)
    monitor = eq.Monitor(optimizer, model, every=every)
    train(model, optimizer, steps)
    return numbers(monitor)


# Checks: each is called on every process --------------------------------------------------------


def readings(strategy, steps, kinds, dtype=torch.float64, intervals=(1, 4)):
    """Readings of a distributed network, for some optimizers, measured at all or at some steps."""
    found = {}
    parts = parallel_of_data(strategy)
    for kind in kinds:
        model = STRATEGIES[strategy](network(dtype))
        optimizer = optimizer_for(model, kind)
        watching = monitors(model, optimizer, intervals)
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        part = dist.get_rank() * parts // dist.get_world_size()
        train(model, optimizer, steps, parts=parts, part=part, replicated=whole)
        found |= {(kind, every): numbers(monitor) for every, monitor in watching.items()}
    return found


def rotations(strategy, kind, steps):
    """Rotations, and the reading without the scale-invariant weight, next to a single process's."""

    def run(make, **where):
        model = network()
        model.down.bias = None  # so that the weight before the norm is scale-invariant
        model = make(model)
        optimizer = optimizer_for(model, kind)
        monitor = eq.Monitor(optimizer, model, every=2, scale_invariant=False)
        train(model, optimizer, steps, **where)
        resumed = eq.Monitor(optimizer, model)
        resumed.load_state_dict(monitor.state_dict())
        tables = [each.layers().layers for each in (monitor, resumed)]
        turned = [{layer.name: astuple(layer.rotation) for layer in table} for table in tables]
        return turned, [plain(each.reading()) for each in (monitor, resumed)]

    parts = parallel_of_data(strategy)
    part = dist.get_rank() * parts // dist.get_world_size()
    return run(STRATEGIES[strategy], parts=parts, part=part), run(lambda model: model)


def exchanged_states(strategy, kind, steps):
    """Readings of a plain and a sharded run, and of monitors that have loaded the other's state."""
    parts = parallel_of_data(strategy)
    part = dist.get_rank() * parts // dist.get_world_size()
    runs = []
    for model, where in (
        (network(), {}),
        (STRATEGIES[strategy](network()), {"parts": parts, "part": part}),
    ):
        optimizer = optimizer_for(model, kind)
        monitor = eq.Monitor(optimizer, model, every=4)
        train(model, optimizer, steps, **where)
        runs.append((model, optimizer, where, monitor))
    states = [monitor.state_dict() for *_, monitor in runs]
    found = []
    for (model, optimizer, where, monitor), state in zip(runs, reversed(states), strict=True):
        loaded = eq.Monitor(optimizer, model)
        loaded.load_state_dict(state)
        train(model, optimizer, steps, first=steps, **where)
        found += [numbers(monitor), numbers(loaded)]
    return found


def without_collectives(function, *args):
    """Call a function in which no collective may be started, and return its result."""
    names = ["all_reduce", "all_gather", "broadcast", "reduce_scatter_tensor", "barrier"]
    before = {name: getattr(dist, name) for name in names}

    def fail(*args, **kwargs):
        raise AssertionError("a collective was started")

    try:
        for name in names:
            setattr(dist, name, fail)
        return function(*args)
    finally:
        for name, each in before.items():
            setattr(dist, name, each)


def data_parallel(kind, every, steps):
    """Readings under DistributedDataParallel, where the monitor starts no collective."""
    wrapped = DistributedDataParallel(network())
    optimizer = optimizer_for(wrapped.module, kind)
    monitor = eq.Monitor(optimizer, wrapped.module, every=every)
    train(wrapped, optimizer, steps, parts=4, part=dist.get_rank())
    return without_collectives(lambda: (numbers(monitor), monitor.state_dict()["step"]))


def collectives(strategy, steps):
    """Return the sizes of the tensors that a monitor reduces: training, reading, state."""
    model = STRATEGIES[strategy](network())
    optimizer = optimizer_for(model, "momentum")
    monitor = eq.Monitor(optimizer, model, every=4)
    sizes = []

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return dist.all_reduce(tensor, *args, **kwargs)

    parts = parallel_of_data(strategy)
    part = dist.get_rank() * parts // dist.get_world_size()
    sharding.dist = SimpleNamespace(**{**vars(dist), "all_reduce": counted})  # not FSDP's
    try:
        found = []
        for call in (
            lambda: train(model, optimizer, steps, parts=parts, part=part),
            monitor.reading,
            lambda: (lambda read: (read.whole, read.groups, read.layers()))(monitor.read()),
            monitor.layers,
        ):
            sizes.clear()
            call()
            found.append(list(sizes))
        return found
    finally:
        sharding.dist = dist


def edited(how):
    """Readings after parameters were edited between two measured steps; expected ones with it."""

    def run(model, **where):
        optimizer = optimizer_for(model, "sgd")
        monitor = eq.Monitor(optimizer, model, every=4)
        train(model, optimizer, 6, **where)
        with torch.no_grad():
            for p in model.parameters():
                (p.to_local() if how == "local" and isinstance(p, DTensor) else p).mul_(1.5)
        train(model, optimizer, 9, first=6, **where)
        return numbers(monitor)

    found = run(STRATEGIES["FSDP2"](network()), parts=4, part=dist.get_rank())
    return found, run(network())


def decisions(strategy, steps):
    """Learning rates after each decision of a scheduler whose threshold is always met."""
    model = STRATEGIES[strategy](network())
    optimizer = optimizer_for(model, "momentum")
    monitor = eq.Monitor(optimizer, every=2)
    scheduler = eq.FDRScheduler(optimizer, threshold=1e9, factor=0.5, min_steps=3, monitor=monitor)
    parts = parallel_of_data(strategy)
    part = dist.get_rank() * parts // dist.get_world_size()
    found = []
    for epoch in range(4):
        train(model, optimizer, steps, parts=parts, part=part, first=epoch * steps)
        scheduler.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        found.append((rates, scheduler.last_decision))
    return found


def partial_gradients(kind, every, steps, first_whole):
    """A replicated parameter whose gradients are partial, next to a single process's.

    With `first_whole` gradients become partial only after some steps.
    """
    over = mesh(4)
    cls, settings = OPTIMIZERS[kind]

    def run(distributed):
        start = torch.linspace(-1, 1, 12).view(3, 4)
        theta = start.clone()
        if distributed:
            theta = distribute_tensor(theta, over, [Replicate()])
        model = nn.ParameterDict({"theta": nn.Parameter(theta)})
        theta = model["theta"]
        optimizer = cls([theta], **settings)
        monitor = eq.Monitor(optimizer, model, every=every)
        for t in range(steps):
            generator = torch.Generator().manual_seed(t)
            terms = torch.randn(4, 3, 4, generator=generator)
            if not distributed:
                theta.grad = terms.sum(0)
            elif first_whole and t < steps // 2:
                theta.grad = distribute_tensor(terms.sum(0), over, [Replicate()])
            else:
                theta.grad = DTensor.from_local(terms[dist.get_rank()], over, [Partial()])
            optimizer.step()
        return numbers(monitor)

    return run(True), run(False)


def traced(steps):
    """The trace of a sharded and a replicated tensor, and of the same on a single process."""
    over = mesh(4)

    def run(distributed):
        values = torch.linspace(-1, 1, 44, dtype=torch.float64).split([32, 12])
        params = [values[0].view(8, 4), values[1]]
        placements = [Shard(0)], [Replicate()]

        def place(tensors):
            if not distributed:
                return list(tensors)
            return [distribute_tensor(t, over, p) for t, p in zip(tensors, placements, strict=True)]

        params = [nn.Parameter(p) for p in place(params)]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.5)
        monitor, rule = eq.Monitor(optimizer, every=1), Stationary()
        generator = torch.Generator().manual_seed(0)
        for t in range(steps):
            rule.follow(monitor)
            if t == steps // 2:
                rule.load_state_dict(rule.state_dict(), monitor)
            noise = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in params]
            for p, g in zip(params, place(noise), strict=True):
                p.grad = g
            optimizer.step()
        return rule.positions

    return run(True), run(False)


def partial_parameter():
    """The error for a parameter of which each process holds a summand."""
    theta = nn.Parameter(DTensor.from_local(torch.ones(3), mesh(4), [Partial()]))
    return error_of(lambda: eq.Monitor(torch.optim.SGD([theta], lr=0.1)))


def error_of(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def zero_redundancy(kind, every, steps):
    """Readings with `ZeroRedundancyOptimizer`, in the step form."""
    with quiet():  # a deprecated function of torch is called when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer

    cls, settings = OPTIMIZERS[kind]
    wrapped = DistributedDataParallel(network())
    with quiet():
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), cls, **settings)
    monitor = eq.Monitor(optimizer, wrapped.module, every=every)
    train(wrapped, optimizer, steps, parts=4, part=dist.get_rank())
    return numbers(monitor)


def fsdp1(use_orig_params):
    """The error for shards of FSDP1."""
    with quiet():
        model = FSDP1(network(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return error_of(lambda: eq.Monitor(optimizer))
