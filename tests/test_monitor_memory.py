"""A monitor does not grow with the number of steps, and its readings do not become slower."""

import gc
import os
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn

import equilibrate as eq


def reading_time(monitor):
    times = []
    for _ in range(15):
        start = time.perf_counter()
        monitor.parameter_readings()
        times.append(time.perf_counter() - start)
    return median(times)


def resident():
    """Return the resident memory of this process in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("every", [1, 16])
def test_nothing_grows_with_the_number_of_steps(every):
    named = {f"p{i}": nn.Parameter(torch.randn(3)) for i in range(20)}
    optimizer = torch.optim.SGD(named.values(), lr=1e-3, momentum=0.9, fused=True)
    monitor = eq.Monitor(optimizer, every=every, named_parameters=named)
    for p in named.values():
        p.grad = torch.randn_like(p)

    def train(steps):
        for _ in range(steps):
            optimizer.step()
        monitor.reading()
        gc.collect()

    train(5_000)
    first, before = reading_time(monitor), resident()
    train(10_000)
    assert resident() - before < 2e6
    assert reading_time(monitor) < 1.5 * first + 1e-3
    assert all(len(probe.ring.window._lengths) <= 4096 for probe in monitor._watch.probes)
    assert all(len(probe.ring.entries) < 64 for probe in monitor._watch.probes)
