"""A scheduler that cools down linearly to the end of a training, from its first decision on."""

import linecache

import pytest
import torch
from torch import nn

import equilibrate as eq
from equilibrate.rules import Verdict


class At:
    """A rule that acts from a step on, and counts how often it was asked."""

    def __init__(self, step):
        self.step, self.asked = step, 0

    def judge(self, reading):
        self.asked += 1
        return Verdict(reading.step >= self.step, f"{reading.step} steps")


def scheduled(rule=None, lr=1.0, groups=1, **options):
    params = [nn.Parameter(torch.ones(2)) for _ in range(groups)]
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr": lr / (i + 1)} for i, p in enumerate(params)], lr=lr
    )
    options = {"cooldown_end": 100, "min_steps": 1, "every": 1} | options
    return optimizer, eq.FDRScheduler(optimizer, rule=rule or At(60), **options)


def train(optimizer, scheduler, steps, each=1):
    """Return the learning rate of every group at each step."""
    rates = []
    for step in range(1, steps + 1):
        rates.append([group["lr"] for group in optimizer.param_groups])
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = 1e-3 * torch.randn_like(p)
        optimizer.step()
        if step % each == 0:
            scheduler.step()
    return rates


def test_the_rate_falls_linearly_to_zero_from_the_first_decision_on():
    rule = At(60)
    optimizer, scheduler = scheduled(rule, groups=2)
    rates = train(optimizer, scheduler, 59)
    assert rates == [[1.0, 0.5]] * 59
    train(optimizer, scheduler, 1)
    decision = scheduler.last_decision
    assert decision.lowered
    assert decision.reason == "60 steps; cooling down linearly until step 100"
    assert decision.lrs == (1.0, 0.5)
    asked = rule.asked
    rates = train(optimizer, scheduler, 45)
    expected = [max(0.0, (100 - step) / 40) for step in range(60, 105)]
    assert [one for one, _ in rates] == pytest.approx(expected)
    assert [two for _, two in rates] == pytest.approx([0.5 * x for x in expected])
    assert rates[40] == [0, 0]  # the step after the last one
    assert rule.asked == asked  # not again
    assert not scheduler.last_decision.lowered
    assert scheduler.last_decision.reason == "the cooldown has ended at step 100"
    assert [judgement.step for judgement in scheduler.judgements if judgement.lowered] == [60]


def test_calls_at_the_ends_of_epochs_make_a_staircase():
    optimizer, scheduler = scheduled()
    with pytest.warns(UserWarning, match=r"after 20 optimizer steps, .* every opt") as caught:
        rates = [rate for (rate,) in train(optimizer, scheduler, 100, each=20)]
    assert len(caught) == 1
    assert rates == pytest.approx([1.0] * 80 + [0.5] * 20)


def test_min_lr_is_the_end_of_the_line():
    optimizer, scheduler = scheduled(min_lr=0.2)
    rates = [rate for (rate,) in train(optimizer, scheduler, 80)]
    assert rates[:60] == [1.0] * 60
    assert rates[70] == pytest.approx(0.8)
    assert scheduler.last_decision.reason == (
        "cooling down until step 100: 60.0% of the learning rate is left"
    )
    rates = [rate for (rate,) in train(optimizer, scheduler, 30)]
    assert min(rates) == rates[-1] == 0.2
    optimizer, scheduler = scheduled(min_lr=2.0)
    train(optimizer, scheduler, 80)
    assert scheduler.last_decision.reason == "80 steps, but lr is at min_lr"
    assert optimizer.param_groups[0]["lr"] == 1.0  # never raised


def test_a_lower_rate_that_somebody_else_set_is_not_raised():
    optimizer, scheduler = scheduled()
    train(optimizer, scheduler, 70)
    optimizer.param_groups[0]["lr"] = 0.01
    train(optimizer, scheduler, 10)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_without_a_decision_it_begins_when_a_tenth_of_the_steps_is_left():
    rule = At(1000)
    optimizer, scheduler = scheduled(rule)
    rates = [rate for (rate,) in train(optimizer, scheduler, 90)]
    assert rates == [1.0] * 90
    decision = scheduler.last_decision
    assert decision.lowered
    assert decision.reason == (
        "no decision so far (90 steps); cooling down linearly until step 100"
    )
    assert (rule.asked, len(scheduler.judgements)) == (90, 90)
    assert [one.step for one in scheduler.judgements if one.lowered] == [90]
    rates = [rate for (rate,) in train(optimizer, scheduler, 12)]
    assert rates == pytest.approx([1 - i / 10 for i in range(10)] + [0, 0])
    assert rule.asked == 90


def test_it_begins_on_time_while_the_rule_waits_for_steps():
    optimizer, scheduler = scheduled(At(1000), min_steps=80)
    train(optimizer, scheduler, 95)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


def test_a_decision_in_the_last_tenth_is_one():
    optimizer, scheduler = scheduled(At(90), min_steps=80)
    train(optimizer, scheduler, 90)
    assert scheduler.last_decision.reason == "90 steps; cooling down linearly until step 100"


@pytest.mark.parametrize("end", [2, 9])
def test_short_trainings_cool_down_in_their_last_steps(end):
    optimizer, scheduler = scheduled(At(1000), cooldown_end=end)
    rates = [rate for (rate,) in train(optimizer, scheduler, end + 1)]
    assert rates == [1.0] * end + [0.0]


def test_a_rule_without_its_losses_says_so_when_the_cooldown_begins():
    optimizer, scheduler = scheduled(eq.rules.Gain())
    with pytest.warns(UserWarning, match=r"Gain needs the training loss, .*call scheduler\.step\("):
        train(optimizer, scheduler, 90)
    assert "no decision so far (no loss was handed over" in scheduler.last_decision.reason


def test_a_rule_is_told_the_number_of_steps():
    _, scheduler = scheduled(eq.rules.Gain(ahead=2.0))
    assert scheduler.rule == eq.rules.Gain(ahead=2.0, total_steps=100)
    _, scheduler = scheduled(eq.rules.Gain(total_steps=100))
    assert scheduler.rule == eq.rules.Gain(total_steps=100)
    with pytest.raises(ValueError, match=r"Gain has total_steps=50, but cooldown_end=100.*leave"):
        scheduled(eq.rules.Gain(total_steps=50))
    _, scheduler = scheduled(At(60))
    assert isinstance(scheduler.rule, At)  # without such a field
    _, restored = scheduled(eq.rules.Gain(), cooldown_end=None)
    assert restored.rule == eq.rules.Gain()
    _, scheduler = scheduled(eq.rules.Gain())
    state = scheduler.state_dict()
    state["rule"]["total_steps"] = None  # as states from before rules were told
    restored.load_state_dict(state)
    assert restored.rule == eq.rules.Gain(total_steps=100)


def test_a_training_that_goes_on_at_a_rate_of_zero_is_told_once():
    """As if `cooldown_end` were a number of epochs."""
    optimizer, scheduler = scheduled(At(1000), cooldown_end=12)
    train(optimizer, scheduler, 20)  # a trainer may step a little longer
    optimizer.step()
    with pytest.warns(UserWarning, match=r"cooldown_end=12.* counts optimizer steps") as caught:
        scheduler.step()
    assert caught[0].filename == __file__
    train(optimizer, scheduler, 30)
    optimizer, scheduler = scheduled(At(1000), cooldown_end=12, min_lr=0.01)
    train(optimizer, scheduler, 60)  # at min_lr a training can go on


def test_a_decision_after_the_end_multiplies_by_the_factor():
    optimizer, scheduler = scheduled(At(120), factor=0.5)
    with pytest.warns(UserWarning, match="cooldown_end=100") as warned:
        rates = [rate for (rate,) in train(optimizer, scheduler, 121, each=60)]
    rare, passed = warned
    assert str(rare.message).startswith("step() was called after 60 optimizer steps")
    assert "cooldown_end=100 has passed without a cooldown" in str(passed.message)
    for each in warned:
        assert "scheduler.step()" in linecache.getline(each.filename, each.lineno)
    assert rates[-2:] == [1.0, 0.5]
    train(optimizer, scheduler, 60)  # one warning is enough


@pytest.mark.parametrize(("decision", "stopped"), [(60, 40), (60, 75), (1000, 80), (1000, 95)])
def test_a_run_stopped_and_resumed_cools_down_as_if_it_had_not_been(tmp_path, decision, stopped):
    torch.manual_seed(0)
    optimizer, scheduler = scheduled(At(decision), groups=2)
    whole = train(optimizer, scheduler, 100)
    torch.manual_seed(0)
    optimizer, scheduler = scheduled(At(decision), groups=2)
    train(optimizer, scheduler, stopped)
    states = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(states, tmp_path / "state.pt")
    states = torch.load(tmp_path / "state.pt")
    for options in ({}, {"cooldown_end": None}):  # settings are restored, as by torch's own
        optimizer, scheduler = scheduled(At(decision), groups=2, **options)
        optimizer.load_state_dict(states["optimizer"])
        scheduler.load_state_dict(states["scheduler"])
        assert train(optimizer, scheduler, 100 - stopped) == whole[stopped:]


def test_a_state_without_a_cooldown_ends_one():
    _, without = scheduled(cooldown_end=None)
    optimizer, scheduler = scheduled(At(5))
    train(optimizer, scheduler, 10)
    scheduler.load_state_dict(without.state_dict())
    optimizer.param_groups[0]["lr"] = 1.0
    train(optimizer, scheduler, 3)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_group_added_later_keeps_its_rate():
    optimizer, scheduler = scheduled()
    train(optimizer, scheduler, 70)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.2})
    rates = train(optimizer, scheduler, 20)
    assert rates[-1] == pytest.approx([11 / 40, 0.2])


def test_a_state_that_knows_no_cooldown_is_loaded():
    optimizer, scheduler = scheduled(cooldown_end=None)
    state = scheduler.state_dict()
    del state["cooldown"]
    scheduler.load_state_dict(state)
    train(optimizer, scheduler, 3)


@pytest.mark.parametrize("wrong", [0, -5, 2.5, True])
def test_wrong_ends_are_named(wrong):
    with pytest.raises(ValueError, match=rf"cooldown_end must be a whole .* 1, got {wrong}"):
        scheduled(cooldown_end=wrong)


def test_an_end_that_has_passed_is_named():
    optimizer, scheduler = scheduled()
    train(optimizer, scheduler, 100)
    with pytest.raises(ValueError, match="cooldown_end is 100, but the monitor has seen 100 steps"):
        eq.FDRScheduler(optimizer, monitor=scheduler.monitor, cooldown_end=100)


def test_gain_begins_the_cooldown_of_a_noisy_quadratic_by_itself():
    """It comes down from far away first, and ends with far less loss than a constant rate."""
    losses, lowered = {}, []
    for cools in (False, True):
        torch.manual_seed(0)
        theta = nn.Parameter(torch.full((40,), 10.0))
        optimizer = torch.optim.SGD([theta], lr=0.02)
        rule = eq.rules.Gain(total_steps=3000)
        forecaster = eq.Forecaster(optimizer, every=4)
        scheduler = eq.FDRScheduler(optimizer, rule=rule, cooldown_end=3000, forecaster=forecaster)
        for _ in range(3000):
            theta.grad = theta.detach() + torch.randn(40)
            loss = 0.5 * theta.detach().square().sum()
            optimizer.step()
            if cools:
                scheduler.step(loss)
        losses[cools] = 0.5 * theta.detach().square().sum().item()
        lowered += [made.step for made in scheduler.judgements if made.lowered]
    assert len(lowered) == 1
    assert 600 < lowered[0] < 2900
    # At rest 40 · η/(4 − 2η) = 0.2; the cooldown over more than a thousand steps leaves a tenth.
    assert losses[True] < 0.3 * losses[False]


@pytest.mark.parametrize("moved_at", [40, 80])
def test_the_end_can_be_moved(moved_at):
    """Before the cooldown it is another one; a cooldown that has begun continues to the new end."""
    optimizer, scheduler = scheduled(At(60))
    train(optimizer, scheduler, moved_at)
    scheduler.cooldown_end = 200
    assert scheduler.cooldown_end == 200
    rates = [rate for (rate,) in train(optimizer, scheduler, 200 - moved_at)]
    start, first = (60, 1.0) if moved_at == 40 else (80, 0.5)
    expected = [min(1.0, first * (200 - step) / (200 - start)) for step in range(moved_at, 200)]
    assert rates == pytest.approx(expected)
    assert optimizer.param_groups[0]["lr"] == 0
    with pytest.raises(ValueError, match="cooldown_end is 150, but the monitor has seen 200 steps"):
        scheduler.cooldown_end = 150


def test_a_training_that_has_cooled_down_can_be_continued():
    optimizer, scheduler = scheduled(At(60))
    train(optimizer, scheduler, 100)
    scheduler.cooldown_end = 300
    optimizer.param_groups[0]["lr"] = 0.5
    train(optimizer, scheduler, 1)  # the rule says so at once
    assert scheduler.last_decision.lowered
    rates = [rate for (rate,) in train(optimizer, scheduler, 100)]
    assert rates[-1] == pytest.approx(0.5 * 100 / 199)


def test_a_rule_is_told_the_end_whenever_either_is_set():
    _, scheduler = scheduled(eq.rules.Gain(ahead=2.0))
    scheduler.cooldown_end = 200
    assert scheduler.rule == eq.rules.Gain(ahead=2.0, total_steps=200)
    scheduler.rule = eq.rules.Gain(confidence=0.9)
    assert scheduler.rule == eq.rules.Gain(confidence=0.9, total_steps=200)
    with pytest.raises(ValueError, match="Gain has total_steps=50, but cooldown_end=200"):
        scheduler.rule = eq.rules.Gain(total_steps=50)


def test_the_first_rule_can_be_set_again():
    optimizer, scheduler = scheduled(eq.rules.Gain())
    scheduler.rule = eq.rules.Threshold()
    train(optimizer, scheduler, 50)  # does not warn of losses
    scheduler.rule = eq.rules.Gain()
    assert scheduler.rule == eq.rules.Gain(total_steps=100)


def test_a_rule_that_needs_more_cannot_be_set():
    _, scheduler = scheduled(eq.rules.Threshold())
    scheduler.rule = eq.rules.Threshold(0.2)
    assert scheduler.rule == eq.rules.Threshold(0.2)
    with pytest.raises(ValueError, match=r"Gain needs forecasts, losses, .* create it with this"):
        scheduler.rule = eq.rules.Gain()
    with pytest.raises(TypeError, match=r"got the class Threshold: pass Threshold\(\)"):
        scheduler.rule = eq.rules.Threshold
