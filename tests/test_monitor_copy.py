"""Copies of a model, its optimizer and its scheduler: the copy's monitor reads the copy."""

import copy
import pickle

import pytest
import torch
from support.monitored import small_model, train

import equilibrate as eq

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda parts: pickle.loads(pickle.dumps(parts)),
}


def start(kind, every, named=True):
    model = small_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    names = model.named_parameters() if named else None
    monitor = eq.Monitor(optimizer, every=every, named_parameters=names)
    scheduler = eq.FDRScheduler(optimizer, threshold=1e9, factor=0.5, min_steps=10, monitor=monitor)
    train(model, optimizer, steps=9)
    scheduler.step()
    return model, optimizer, scheduler


def go_on(model, optimizer, scheduler):
    train(model, optimizer, steps=13)
    scheduler.step()
    return scheduler.last_decision, scheduler.monitor.parameter_readings()


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_copy_continues_as_the_original_does(kind, how, every):
    parts = start(kind, every)
    copied = COPIES[how](parts)
    _, optimizer, scheduler = copied
    assert scheduler.optimizer is optimizer
    assert scheduler.monitor.optimizer is optimizer
    assert optimizer is not parts[1]
    original = parts[2].monitor.reading(), parts[2].monitor.parameter_readings()
    decision, readings = go_on(*copied)
    assert decision.lowered
    assert list(readings) == [name for name, _ in parts[0].named_parameters()]
    # The original has not moved, and continues to the same numbers.
    assert (parts[2].monitor.reading(), parts[2].monitor.parameter_readings()) == original
    assert go_on(*parts)[0] == decision
    assert parts[2].monitor.reading() == scheduler.monitor.reading()


@pytest.mark.parametrize("how", COPIES)
def test_a_monitor_is_copied_with_its_optimizer(how):
    _, optimizer, scheduler = start("sgd", every=3, named=False)
    monitor = COPIES[how](scheduler.monitor)
    assert monitor.optimizer is not optimizer
    assert monitor.every == 3
    assert monitor.reading() == scheduler.monitor.reading()
    with pytest.raises(ValueError, match="no name for any parameter"):
        monitor.parameter_readings()
    step = monitor.step
    optimizer.step()
    assert (monitor.step, scheduler.monitor.step) == (step, step + 1)
    monitor.optimizer.step()
    assert monitor.step == step + 1
