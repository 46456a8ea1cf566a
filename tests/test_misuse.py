"""Loops in which a `Cooldown` would have no effect, or another one, say so once, and early."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import equilibrate as eq

compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # parts of torch that it uses


def made(total_steps=1000, kind=torch.optim.SGD, lr=0.2, **options):
    theta = nn.Parameter(torch.ones(3))
    optimizer = kind([theta], lr=lr)
    return theta, optimizer, eq.Cooldown(optimizer, total_steps, **options)


def steps(theta, optimizer, number=1, step=None):
    for _ in range(number):
        theta.grad = torch.randn(3)
        (step or optimizer.step)()


def told_once(loop, match):
    """Run a loop, in which there must be one warning of ours, at a line of this file."""
    with pytest.warns(UserWarning, match=match) as told:
        loop()
    found = [each for each in told if each.category is UserWarning]
    assert len(found) == 1
    assert found[0].filename == __file__


@compiles
@pytest.mark.parametrize("warmup_steps", [0, 500])
def test_compiled_steps_are_told_of_and_measure_shows_them(warmup_steps):
    torch._dynamo.reset()
    theta, optimizer, scheduler = made(warmup_steps=warmup_steps)
    compiled = torch.compile(type(optimizer).step, backend="eager")
    theta.grad = torch.ones(3)

    def loop(measured):
        for _ in range(140):
            if measured:
                with eq.measure(optimizer):
                    compiled(optimizer)
            else:
                compiled(optimizer)
            scheduler.step(1.0)

    told_once(lambda: loop(False), r"no optimizer step was seen .* eq.measure\(optimizer\)")
    assert scheduler.last_epoch == 140
    theta, optimizer, scheduler = made(warmup_steps=warmup_steps)
    theta.grad = torch.ones(3)
    loop(True)
    assert scheduler.forecaster.step == 140


def test_a_scheduler_that_is_never_called_is_told_of():
    theta, optimizer, scheduler = made()
    told_once(lambda: steps(theta, optimizer, 600), r"made 200 steps, but step\(\) .* not called")
    scheduler.step(1.0)  # it is not told of the same again
    assert scheduler.last_epoch == 1
    theta, optimizer, scheduler = made()
    del scheduler  # as in a notebook cell that is run again
    steps(theta, optimizer, 600)


def test_a_handler_that_only_asks_for_the_rate_is_told_of():
    """As ignite's LRScheduler does."""
    theta, optimizer, scheduler = made()

    def loop():
        for _ in range(300):
            steps(theta, optimizer)
            optimizer.param_groups[0]["lr"] = scheduler.get_lr()[0]
            scheduler.last_epoch += 1

    told_once(loop, r"as ignite's LRScheduler does")


@pytest.mark.parametrize("warmup_steps", [0, 900])
@pytest.mark.parametrize(("calls", "made_steps"), [(2, 1), (8, 1), (1, 2), (1, 50), (1, 390)])
def test_calls_once_a_micro_batch_or_once_an_epoch_are_told_of(calls, made_steps, warmup_steps):
    theta, optimizer, scheduler = made(warmup_steps=warmup_steps)

    def loop():
        while max(scheduler.last_epoch, scheduler.forecaster.step) < 400:
            steps(theta, optimizer, made_steps)
            for _ in range(calls):
                scheduler.step(1.0)

    told_once(loop, r"not called once after every|step\(\) of the scheduler was not called")


def test_steps_that_gradient_scaling_skips_at_the_start_are_no_mismatch():
    theta, optimizer, scheduler = made()
    for step in range(400):
        steps(theta, optimizer, step >= 16)
        scheduler.step(1.0)


@pytest.mark.parametrize("order", ["after", "before"])
def test_another_scheduler_that_overwrites_the_decay_is_told_of(order):
    theta, optimizer, scheduler = made(100)
    other = LambdaLR(optimizer, lambda _: 1.0)

    def loop():
        for _ in range(100):
            steps(theta, optimizer)
            if order == "before":
                other.step()
            scheduler.step(1.0)
            if order == "after":
                other.step()

    if order == "before":  # the optimizer steps with our rate
        loop()
        assert optimizer.param_groups[0]["lr"] == 0
    else:
        told_once(loop, r"a step with lr=0.2, but the decay of the scheduler has set it to 0.19")
        assert optimizer.param_groups[0]["lr"] == 0.2


def test_another_scheduler_that_lowers_the_constant_rate_is_told_of():
    theta, optimizer, scheduler = made(10_000)
    other = CosineAnnealingLR(optimizer, 10_000)

    def loop():
        for _ in range(400):
            steps(theta, optimizer)
            scheduler.step(1.0)
            other.step()

    told_once(loop, r"falls \(0.\d+, 0.\d+, 0.\d+ at the last three checks\) although the decay")


def test_a_warm_up_and_one_lowering_by_hand_are_not_told_of():
    theta, optimizer, scheduler = made(1000)
    warm_up = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 450))
    for step in range(1000):
        steps(theta, optimizer)
        if step < 500:
            warm_up.step()
        elif step == 600 and not scheduler.is_decaying:
            optimizer.param_groups[0]["lr"] = 0.1
        scheduler.step(1.0)
    assert scheduler.is_decaying


def trained(kind, number=50):
    theta, optimizer, scheduler = made(kind=kind)
    for _ in range(number):
        steps(theta, optimizer)
        scheduler.step(1.0)
    return copy.deepcopy({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})


def momentum(params, lr):
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


@pytest.mark.parametrize("kind", [momentum, torch.optim.AdamW])
def test_an_optimizer_that_is_resumed_without_its_scheduler_is_told_of(kind):
    state = trained(kind)
    theta, optimizer, scheduler = made(kind=kind)
    optimizer.load_state_dict(state["optimizer"])
    told_once(
        lambda: steps(theta, optimizer, 2), r"a state was loaded into the optimizer, but none into"
    )
    for first in ("optimizer", "scheduler"):
        theta, optimizer, scheduler = made(kind=kind)
        parts = {"optimizer": optimizer, "scheduler": scheduler}
        for name in sorted(parts, key=lambda name: name != first):
            parts[name].load_state_dict(state[name])
        steps(theta, optimizer)
        scheduler.step(1.0)
        assert scheduler.last_epoch == 51
    theta = nn.Parameter(torch.ones(3))
    optimizer = kind([theta], lr=0.2)
    optimizer.load_state_dict(state["optimizer"])
    scheduler = eq.Cooldown(optimizer, 1000)  # a new schedule, on purpose
    steps(theta, optimizer)
    scheduler.step(1.0)
    assert scheduler.last_epoch == 1


def test_a_bound_above_the_learning_rate_is_told_of_at_once():
    told_once(lambda: made(min_lr=0.3), r"min_lr=0.3 is above the learning rate 0.2 of parameter")
    theta = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [theta], "lr": 0.2}, {"params": [], "lr": 0.0}])
    LambdaLR(optimizer, lambda step: step / 100)  # begins at zero, and a group is frozen
    eq.Cooldown(optimizer, 1000, min_lr=0.1)


def test_what_watches_the_loop_is_not_copied_and_ends():
    theta, optimizer, scheduler = made(100)
    before = len(optimizer._optimizer_step_post_hooks)
    copied = copy.deepcopy(scheduler)
    steps(theta, optimizer)
    scheduler.step(1.0)
    assert len(optimizer._optimizer_step_post_hooks) == before - 1
    steps(copied.optimizer.param_groups[0]["params"][0], copied.optimizer)
    copied.step(1.0)
    with warnings.catch_warnings(action="ignore"):  # both decay although no steps are made
        for _ in range(90):
            scheduler.step(1.0)
        copy.deepcopy(scheduler).step(1.0)
        for _ in range(70):
            scheduler.step(1.0)
    assert not optimizer._optimizer_step_post_hooks
