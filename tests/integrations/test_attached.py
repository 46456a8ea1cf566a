"""What the callbacks of all trainers have in common, without a trainer."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from support.rules import Noting
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


def plan(schedule=True, interval="epoch", layers=False, horizons=None, **settings):
    return Plan({"every": 1} | settings, schedule, interval, layers, horizons)


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
    one = attach(model, optimizer, Plan({}, schedule=False, layers=True))
    steps(optimizer, 20)
    assert one.advance(epoch_ended=True) is None
    assert one.scheduler is None
    assert one.monitor.every == eq.Monitor(optimizer).every
    assert "equilibrate_layers/0.bias/residual" in one.scalars()


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


def test_a_lowering_is_logged_once():
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan(layers=True, **EAGER))
    steps(optimizer, 20)
    assert one.advance(epoch_ended=True).lowered
    found = one.scalars()
    assert (found["equilibrate/lowered"], found["equilibrate/lr"]) == (1, 0.05)
    steps(optimizer, 3)
    found = one.scalars()
    assert found["equilibrate/lowered"] == 0  # there was no decision since
    assert "equilibrate_layers/0.bias/residual" in found


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.8 passes it in SequentialLR
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


@pytest.mark.filterwarnings("error")  # nothing is undone
def test_a_scheduler_that_computes_rates_from_base_lrs_follows_a_cooldown():
    model, optimizer = model_and_optimizer(2)
    other = LambdaLR(optimizer, lambda step: min(1.0, 0.1 * (step + 1)))
    settings = plan(interval="step", cooldown_end=60, **EAGER)
    one = attach(model, optimizer, settings, others=[other])
    rates = []
    for _ in range(65):
        steps(optimizer, 1, other)
        one.advance(epoch_ended=False)
        rates.append([group["lr"] for group in optimizer.param_groups])
    start = next(i + 1 for i, (rate, _) in enumerate(rates) if rate < 0.1 and i > 10) - 1
    assert 19 <= start <= 21  # the rule acts after 20 steps
    expected = [0.1 * max(0.0, (60 - step) / (60 - start)) for step in range(start, 66)]
    assert [rate for rate, _ in rates[start - 1 :]] == pytest.approx(expected)
    assert [rate for _, rate in rates[start - 1 :]] == pytest.approx([2 * x for x in expected])


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


def test_a_group_may_be_added_after_a_lowering():
    """As fine-tuning callbacks do, at a learning rate of its own."""
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, Plan({"every": 1, **EAGER}, layers=False))
    steps(optimizer, 20)
    assert one.advance(epoch_ended=True).lowered
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters(), "lr": 0.3})
    steps(optimizer, 20)
    assert one.advance(epoch_ended=True).lrs == (0.025, 0.15)


def test_several_optimizers_are_numbered():
    parts = [model_and_optimizer() for _ in range(2)]
    attached = [attach(*part, Plan({}, schedule=False, layers=True)) for part in parts]
    for _, optimizer in parts:
        steps(optimizer, 3)
    found = named(attached)
    assert found["equilibrate/optimizer_0/lr"] == found["equilibrate/optimizer_1/lr"] == 0.1
    assert "equilibrate_layers/optimizer_1/0.bias/residual" in found
    groups = {name.rsplit("/optimizer_")[0] for name in found}
    assert groups == {"equilibrate", "equilibrate_layers"}


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


def test_the_structure_of_a_state_is_the_same_at_any_time():
    """torch.distributed.checkpoint loads into the state of a run that has just begun."""

    def structure(state, path=()):
        if not isinstance(state, dict):
            return {path}
        return set().union(*(structure(value, (*path, key)) for key, value in state.items()))

    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan(horizons=[8], cooldown_end=90, **EAGER), start=10)
    begun = structure(one.state_dict())
    for _ in range(3):
        steps(optimizer, 20)
        one.advance(epoch_ended=True)
        assert structure(one.state_dict()) == begun


# Rules that need more than a reading --------------------------------------------------------------


def test_a_rule_gets_what_it_needs():
    model, optimizer = model_and_optimizer()
    Noting.seen.clear()
    chosen = plan(layers=True, horizons=[8], rule=Noting(), min_steps=10)
    one = attach(model, optimizer, chosen)
    for epoch in (0, 1):
        for t in range(20):
            steps(optimizer, 1)
            one.add_loss(torch.tensor(epoch + 0.01 * t), 2)  # micro-batches add up
            one.add_loss(torch.tensor(2.0), 2)
            one.advance(epoch_ended=t == 19)
    for reading, epoch in zip(Noting.seen, (0, 1), strict=True):
        assert reading.trace is not None
        assert [forecast.horizon for forecast in reading.forecasts] == [8]
        assert reading.losses.steps == (20, 40)[: epoch + 1]
        assert reading.losses.values[-1] == pytest.approx(2.095 + epoch)
    assert "equilibrate/forecast/gain_8" in one.scalars()


def test_losses_before_the_end_of_the_warm_up_are_not_counted():
    model, optimizer = model_and_optimizer()
    Noting.seen.clear()
    one = attach(model, optimizer, plan(rule=Noting(), min_steps=10), start=10)
    for t in range(30):
        steps(optimizer, 1)
        one.add_loss(torch.tensor(100.0 if t < 10 else 1.0))
        one.advance(epoch_ended=t == 29)
    [reading] = Noting.seen
    assert (reading.losses.start, reading.losses.values) == (10, (1.0,))


def test_losses_of_skipped_steps_and_of_few_micro_batches_are_averaged():
    """Gradient scaling skips a step, and an epoch ends with one of four micro-batches."""
    model, optimizer = model_and_optimizer()
    Noting.seen.clear()
    one = attach(model, optimizer, plan(interval="step", rule=Noting(), min_steps=4))
    for number in (4, 4, 1, 4):
        for _ in range(number):
            one.add_loss(torch.tensor(0.25), 4)
        steps(optimizer, 1)
        one.advance(epoch_ended=False)
    one.add_loss(torch.tensor(1.0))
    assert one.advance(epoch_ended=False) is None  # a step that was skipped
    one.add_loss(torch.tensor(3.0))
    steps(optimizer, 1)
    one.advance(epoch_ended=False)
    assert one.scheduler._inputs.losses.losses().values == (1.0, 1.0, 1.0, 1.0, 2.0)


def test_losses_of_low_precision_are_added_up_in_double_precision():
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan(rule=Noting(), min_steps=1))
    steps(optimizer, 1)
    for _ in range(1000):
        one.add_loss(torch.tensor(1.0, dtype=torch.bfloat16))
    one.advance(epoch_ended=True)
    assert one.scheduler._inputs.losses.losses().values == (1.0,)


def test_a_rule_that_needs_a_loss_that_nobody_hands_over():
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan(rule=eq.rules.Gain(), min_steps=10))
    steps(optimizer, 20)
    with pytest.warns(UserWarning, match="Gain needs the training loss"):
        decision = one.advance(epoch_ended=True)
    assert not decision.lowered
    assert one.scheduler.last_decision.reading.losses.values == ()


def test_a_loss_is_not_kept_if_nothing_needs_it():
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan())
    one.add_loss(torch.tensor(1.0))
    assert one.state_dict()["loss"] is None


@pytest.mark.parametrize("rule", [None, Noting()], ids=["own forecaster", "the scheduler's"])
def test_a_state_holds_forecasts_and_half_an_epoch_of_losses(rule):
    chosen = plan(rule=rule, horizons=[8], min_steps=10)

    def half_epochs(optimizer, one, first, last):
        for t in range(10 * first, 10 * last):
            torch.manual_seed(t)
            steps(optimizer, 1)
            one.add_loss(torch.tensor(1.0 + t))
            one.advance(epoch_ended=t % 20 == 19)

    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, chosen)
    half_epochs(optimizer, one, 0, 3)
    copy = deepcopy(model)
    again = torch.optim.SGD(copy.parameters(), lr=0.1)
    other = attach(copy, again, chosen)
    other.load_state_dict(deepcopy(one.state_dict()))
    half_epochs(optimizer, one, 3, 6)
    half_epochs(again, other, 3, 6)
    assert one.forecaster.forecasts() == other.forecaster.forecasts()
    if rule is not None:
        found = one.scheduler.last_decision.reading.losses
        assert found == other.scheduler.last_decision.reading.losses
        assert found.values == (10.5, 30.5, 50.5)


def test_scale_invariant_weights_can_be_left_out():
    model, optimizer = model_and_optimizer()
    assert not attach(model, optimizer, plan(scale_invariant=False)).monitor.scale_invariant


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval": "batch"}, r"interval must be 'epoch' or 'step', got 'batch'"),
        ({"schedule": False, "factor": 0.5}, r"factor is for schedules, but schedule=False"),
        ({"threshold": -1.0}, r"threshold must be a positive number"),
        ({"min_steps": 0}, r"min_steps must be a whole number .* at least 1, got 0"),
        ({"min_lr": -1}, r"min_lr must be one number ≥ 0, .* got -1"),
        ({"min_lr": [0.1, -1]}, r"min_lr must be one number ≥ 0, .* got \[0.1, -1\]"),
        ({"every": 0}, r"every must be a whole number of steps"),
        ({"every": 0, "schedule": False}, r"every must be a whole number of steps"),
        ({"min_lr": np.array(0.01)}, r"min_lr must be one number ≥ 0, .* got array\(0.01\)"),
        ({"horizons": [3], "schedule": False}, r"horizons .* must .* at least 4, got 3"),
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
    numbers = [np.array([0.01, 0.02]), torch.tensor([0.01, 0.02], dtype=torch.float64)]
    for several in numbers:
        assert attach(model, optimizer, plan(min_lr=several)).scheduler.min_lrs == (0.01, 0.02)
    with pytest.raises(ValueError, match="one for each of the 2 parameter group"):
        attach(model, optimizer, plan(min_lr=[0.01]))


def test_the_end_of_a_training_becomes_a_number():
    to_the_end, without = plan(cooldown_end="end"), plan()
    assert to_the_end.with_length(lambda: 80).settings["cooldown_end"] == 80
    assert without.with_length(lambda: 1 // 0) is without
    assert to_the_end.with_length(lambda: 0).settings["cooldown_end"] is None  # nothing is left
    for unknown in (math.inf, -1):
        with pytest.raises(ValueError, match=r"cooldown_end='end', but the trainer .* pass their"):
            to_the_end.with_length(lambda unknown=unknown: unknown)
    with pytest.raises(ValueError, match="cooldown_end must be a whole number"):
        plan(cooldown_end="later")


def test_horizons_may_be_an_iterator():
    model, optimizer = model_and_optimizer()
    one = attach(model, optimizer, plan(horizons=iter((8, 12)), schedule=False))
    assert one.forecaster.horizons == (8, 12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_training_that_continues_after_the_cooldown_is_warned_of(momentum):
    """Without momentum a step at a rate of zero is not counted."""
    weight = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    settings = plan(cooldown_end=20, min_steps=5, interval="step")
    one = Attached(optimizer, settings, start=0, named_parameters=())

    def train(number):
        for _ in range(number):
            steps(optimizer, 1)
            one.advance(epoch_ended=False)

    train(20)
    with pytest.warns(UserWarning, match="continues after cooldown_end=20") as caught:
        train(40)
    assert len(caught) == 1


def test_a_learning_rate_tensor_is_not_read_at_every_step(monkeypatch):
    weight = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1))
    constant = LambdaLR(optimizer, lambda epoch: 1.0)
    settings = plan(interval="step", factor=0.7, threshold=1e9, min_steps=10)
    one = Attached(optimizer, settings, start=0, named_parameters=(), others=[constant])
    while not one.scheduler.last_decision.lowered:
        steps(optimizer, 1)
        one.advance(epoch_ended=False)
    base = list(constant.base_lrs)
    reads = []
    real = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda t: reads.append(t) or real(t))
    for _ in range(5):
        steps(optimizer, 1)
        one.advance(epoch_ended=False)
    assert not any(t is optimizer.param_groups[0]["lr"] for t in reads)
    assert constant.base_lrs == base


def test_a_training_that_is_resumed_for_longer_cools_down_later():
    _, optimizer = model_and_optimizer()
    settings = plan(cooldown_end="end", interval="step", min_steps=1)
    first = Attached(optimizer, settings.with_length(lambda: 100), start=0, named_parameters=())
    steps(optimizer, 10)
    first.advance(epoch_ended=False)
    for length in (100, 300):
        of_length = settings.with_length(lambda length=length: length)
        resumed = Attached(optimizer, of_length, start=0, named_parameters=())
        resumed.load_state_dict(deepcopy(first.state_dict()))
        assert resumed.scheduler.cooldown_end == length
    fixed = plan(cooldown_end=300, interval="step", min_steps=1)
    resumed = Attached(optimizer, fixed, start=0, named_parameters=())
    resumed.load_state_dict(deepcopy(first.state_dict()))
    assert resumed.scheduler.cooldown_end == 100  # as all settings it comes with the state
