"""What loggers are sent; `tests/trainers/test_loggers.py` has the loggers themselves."""

import os

import pytest
import torch
from support.recorded import noisy_steps

import equilibrate as eq
from equilibrate.integrations import loggers
from equilibrate.integrations.scalars import scalars


class Memory:
    def __init__(self):
        self.calls = []

    def write(self, step, numbers, judgements):
        self.calls.append((step, numbers, [(j.step, j.lowered) for j in judgements]))


def made(**settings):
    params = {name: torch.nn.Parameter(torch.randn(6)) for name in ("a.weight", "b.weight")}
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    monitor = eq.Monitor(optimizer, named_parameters=params.items(), every=1)
    return optimizer, eq.FDRScheduler(optimizer, monitor=monitor, min_steps=10, **settings)


def test_numbers_are_those_of_scalars():
    optimizer, scheduler = made(threshold=1e-9)
    logger = loggers.Logger(memory := Memory(), scheduler, layers=True)
    noisy_steps(optimizer, 40)
    scheduler.step()
    logger.log()
    ((step, numbers, judgements),) = memory.calls
    assert numbers == scalars(scheduler, layers=True)
    assert numbers["equilibrate_layers/a.weight/residual"] == (
        scheduler.monitor.parameter_readings()["a.weight"].residual
    )
    assert (step, judgements) == (40, [(40, False)])


def test_each_decision_is_sent_once_and_lowered_is_that_of_the_interval():
    optimizer, scheduler = made(threshold=1e9, factor=0.5)
    logger = loggers.Logger(memory := Memory(), scheduler, every=20)
    for _ in range(60):
        noisy_steps(optimizer, 1)
        scheduler.step()
        logger.log()
    assert [(step, made) for step, _, made in memory.calls] == [
        (20, [(19, True)]),
        (40, [(38, True)]),
        (60, [(57, True)]),
    ]
    assert [numbers["equilibrate/lowered"] for _, numbers, _ in memory.calls] == [1, 1, 1]
    logger.every = 1
    logger.log()
    assert memory.calls[-1][1]["equilibrate/lowered"] == 0  # not the same one again
    assert memory.calls[-1][2] == []


def test_calls_in_between_do_not_read(monkeypatch):
    optimizer, scheduler = made()
    logger = loggers.Logger(memory := Memory(), scheduler.monitor, every=8)
    monkeypatch.setattr(scheduler.monitor, "reading", lambda: pytest.fail("waited"))
    for _ in range(7):
        noisy_steps(optimizer, 1)
        logger.log()
    assert memory.calls == []


def test_a_function_gets_numbers_and_the_step():
    optimizer, scheduler = made()
    calls = []
    logger = loggers.Logger(lambda numbers, step: calls.append((numbers, step)), scheduler.monitor)
    noisy_steps(optimizer, 3)
    logger.log()
    assert calls == [(scalars(scheduler.monitor), 3)]
    assert "equilibrate/lowered" not in calls[0][0]


def test_only_rank_0_writes(monkeypatch):
    optimizer, scheduler = made()
    logger = loggers.Logger(memory := Memory(), scheduler)
    noisy_steps(optimizer, 1)
    monkeypatch.setitem(os.environ, "RANK", "3")
    logger.log()
    assert memory.calls == []


def test_errors():
    _, scheduler = made()
    with pytest.raises(TypeError, match=r"sink must have a method write or .*, got int: pass Ten"):
        loggers.Logger(3, scheduler)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"every must be a whole number of steps, .* got 0"):
        loggers.Logger(Memory(), scheduler, every=0)
    unnamed = eq.Monitor(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(ValueError, match="there is no name for any parameter"):
        loggers.Logger(Memory(), unnamed, layers=True)
