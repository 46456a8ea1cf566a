"""What the callbacks of all trainers have in common, without a trainer."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    LambdaLR,
    LinearLR,
    SequentialLR,
)

import equilibrate as eq
from equilibrate.integrations._attached import Attached, Plan, named

EAGER = {"threshold": 1e9, "factor": 0.5, "min_steps": 10}


def plan(schedule=True, interval="epoch", layers=False, every=1, **settings):
    return Plan(schedule, interval, layers, every, settings)


def model_and_optimizer(groups=1):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(groups)))
    kinds = [{"params": part.parameters(), "lr": 0.1 * (i + 1)} for i, part in enumerate(model)]
    return model, torch.optim.SGD(kinds, lr=0.1)


def attach(model, optimizer, plan, start=0, others=()):
    names = model.named_parameters()
    return Attached(optimizer, plan, start=start, named_parameters=names, others=others)


def steps(optimizer, number, *others):
    for _ in range(number):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = 0.3 * p.detach() + torch.randn_like(p)
        optimizer.step()
        for other in others:
            other.step()


def test_no_decision_is_made_twice_for_one_step():
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan(**EAGER))
    assert one.advance(epoch_ended=True) is None
    steps(optimizer, 20)
    assert one.advance(epoch_ended=False) is None
    decision = one.advance(epoch_ended=True)
    assert decision is not None
    assert decision.lowered
    assert one.advance(epoch_ended=True) is None


def test_a_monitor_alone_never_decides():
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan(schedule=False, layers=True, every=None))
    steps(optimizer, 20)
    assert one.advance(epoch_ended=True) is None
    assert one.scheduler is None
    assert one.monitor.every == eq.Monitor(optimizer).every
    assert "equilibrate/layers/0.bias/residual" in one.scalars()


def test_the_first_window_begins_after_the_warm_up():
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan(interval="step", **EAGER), start=30)
    made = []
    for step in range(1, 61):
        steps(optimizer, 1)
        decision = one.advance(epoch_ended=False)
        if decision is not None:
            made.append((step, decision.reading.count, decision.lowered))
    assert made[0][0] == 31
    assert [row for row in made if row[2]] == [(49, 10, True)]


@pytest.mark.parametrize("kind", ["LambdaLR", "SequentialLR", "ChainedScheduler", "wrapped"])
def test_a_scheduler_that_computes_rates_from_base_lrs_follows(kind):
    model, optimizer = model_and_optimizer(2)
    warm_up = LambdaLR(optimizer, lambda step: min(1.0, 0.1 * (step + 1)))
    if kind == "SequentialLR":
        constant = ConstantLR(optimizer, factor=1.0)
        other = SequentialLR(optimizer, [constant, warm_up], milestones=[5])
    elif kind == "ChainedScheduler":
        other = ChainedScheduler([LinearLR(optimizer, start_factor=1.0), warm_up], optimizer)
    else:
        other = warm_up

    class Wrapped:  # as in accelerate
        scheduler = other

    one = attach(model, optimizer, plan(**EAGER), others=[Wrapped if kind == "wrapped" else other])
    steps(optimizer, 20, other)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert one.advance(epoch_ended=True).lowered
    steps(optimizer, 3, other)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]


def test_a_scheduler_in_the_middle_of_its_warm_up_follows():
    model, optimizer = model_and_optimizer()
    warm_up = LambdaLR(optimizer, lambda step: (step + 1) / 100)
    one = attach(model, optimizer, plan(**EAGER), others=[warm_up])
    steps(optimizer, 49, warm_up)
    assert one.advance(epoch_ended=True).lowered
    steps(optimizer, 50, warm_up)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_lowering_that_something_undoes_is_reported():
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan(**EAGER))
    steps(optimizer, 20)
    assert one.advance(epoch_ended=True).lowered
    optimizer.param_groups[0]["lr"] = 0.1
    steps(optimizer, 5)
    with pytest.warns(UserWarning, match=r"lowered to \[0.05\] and is \[0.1\] again: something"):
        one.advance(epoch_ended=True)


def test_several_optimizers_are_numbered():
    parts = [model_and_optimizer() for _ in range(2)]
    found = named([attach(*part, plan(schedule=False)) for part in parts])
    assert found["equilibrate/optimizer_0/lr"] == found["equilibrate/optimizer_1/lr"] == 0.1


def test_a_state_continues_the_warm_up():
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan(**EAGER), start=30)
    steps(optimizer, 20)
    one.advance(epoch_ended=True)
    other = attach(model, optimizer, plan(**EAGER), start=30)
    other.load_state_dict(one.state_dict())
    steps(optimizer, 10)
    for each in (one, other):
        assert each.advance(epoch_ended=True) is None
    assert one.monitor.reading() == other.monitor.reading()
    assert other.monitor.reading().count == 0
    assert other.state_dict()["started"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval": "batch"}, r"interval must be 'epoch' or 'step', got 'batch'"),
        ({"schedule": False, "factor": 0.5}, r"factor is for schedules, but schedule=False"),
        ({"threshold": -1.0}, r"threshold must be a positive number"),
        ({"min_steps": 0}, r"min_steps must be at least 1, got 0"),
        ({"every": 0}, r"every must be a whole number of steps"),
        ({"every": 0, "schedule": False}, r"every must be a whole number of steps"),
    ],
)
def test_settings_are_checked_before_there_is_an_optimizer(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


def test_a_setting_that_there_is_not():
    with pytest.raises(TypeError, match="treshold"):
        plan(treshold=0.1)


def test_one_floor_for_each_group_is_checked_with_the_optimizer():
    model, optimizer = model_and_optimizer(2)
    assert attach(model, optimizer, plan(min_lr=[0.01, 0.02])).scheduler.min_lrs == (0.01, 0.02)
    with pytest.raises(ValueError, match="one for each of the 2 parameter group"):
        attach(model, optimizer, plan(min_lr=[0.01]))
