"""FDRScheduler is a torch scheduler, decides by a pure rule, and says why."""

import math
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR, StepLR

import equilibrate as eq


def reading(left, right, count=100, **errors):
    return eq.Reading(step=2 * count, count=count, left=left, right=right, lr=0.1, **errors)


class Balanced:
    """A parameter whose sides of FDR1 are equal at every step: θ·g = (η/2) g²."""

    def __init__(self, lrs=(0.5,), **kwargs):
        self.parameters = [nn.Parameter(torch.ones(4)) for _ in lrs]
        groups = [{"params": [p], "lr": lr} for p, lr in zip(self.parameters, lrs, strict=True)]
        self.optimizer = torch.optim.SGD(groups)
        monitor = eq.Monitor(self.optimizer, every=1)
        self.scheduler = eq.FDRScheduler(
            self.optimizer, **{"min_steps": 1, "monitor": monitor, **kwargs}
        )

    def train(self, off=0.0, steps=4):
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                (p,) = group["params"]
                p.data.fill_(1.0)
                p.grad = torch.full((4,), (2 + off) / float(group["lr"]))
            self.optimizer.step()

    def lrs(self):
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def test_it_is_a_torch_scheduler_and_lowers_at_equilibrium():
    run = Balanced(threshold=0.01, factor=0.9)
    assert isinstance(run.scheduler, LRScheduler)
    assert run.scheduler.last_decision.reason == "started: the averaging window begins here"
    run.train(off=0.5)
    run.scheduler.step()
    assert run.scheduler.last_decision.reason.startswith("not yet: |L/R − 1| = ")
    assert run.lrs() == [0.5]
    run.scheduler.monitor.reset()
    run.train()
    run.scheduler.step()
    decision = run.scheduler.last_decision
    assert decision.lowered
    assert decision.step == 8
    assert decision.lr == run.lrs()[0] == pytest.approx(0.45)
    assert decision.reading.residual == pytest.approx(0, abs=1e-6)
    assert run.scheduler.get_last_lr() == run.scheduler.get_lr() == run.lrs()
    assert run.scheduler.monitor.reading().count == 0  # the averages start again
    assert [made.lowered for made in run.scheduler.decisions] == [False, True]
    assert repr(run.scheduler).startswith("FDRScheduler(Threshold(threshold=0.01), factor=0.9, 'eq")


def test_each_group_keeps_its_own_learning_rate_and_bound():
    with pytest.warns(UserWarning, match=r"min_lr=0.3 is above the learning rate 0.1 .* group 2"):
        run = Balanced(lrs=(0.5, 0.2, 0.1), factor=0.5, min_lr=[0.0, 0.15, 0.3])
    for expected in ([0.25, 0.15, 0.1], [0.125, 0.15, 0.1]):
        run.train()
        run.scheduler.step()
        assert run.scheduler.last_decision.lowered
        assert run.lrs() == pytest.approx(expected)
        assert math.isnan(run.scheduler.last_decision.lr)


def test_at_min_lr_nothing_is_lowered():
    run = Balanced(lrs=(0.1 * 3,), min_lr=0.3)  # it differs by rounding alone
    run.train()
    run.scheduler.step()
    assert run.scheduler.last_decision.reason.endswith(", but lr is at min_lr")


def test_tensor_learning_rates_are_changed_in_place():
    lr = torch.tensor(0.5)
    run = Balanced(lrs=(lr,))
    run.train()
    run.scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.45)


def test_it_multiplies_the_current_rate_and_chains_after_a_warm_up():
    run = Balanced(lrs=(0.5,))
    run.optimizer.param_groups[0]["lr"] = 0.3  # whoever set it
    run.train()
    run.scheduler.step()
    assert run.lrs() == pytest.approx([0.27])

    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=0.5)
    warm_up = LinearLR(optimizer, 0.1, total_iters=3)
    monitor = eq.Monitor(optimizer, every=1)
    adaptive = eq.FDRScheduler(optimizer, min_steps=1, monitor=monitor)
    sequence = SequentialLR(optimizer, [warm_up, adaptive], milestones=[3])
    rates = []
    for _ in range(5):
        p.data.fill_(1.0)
        p.grad = torch.full((4,), 2 / optimizer.param_groups[0]["lr"])
        optimizer.step()
        sequence.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.2, 0.35, 0.5, 0.45, 0.405])


def test_a_group_added_later_is_lowered_too():
    run = Balanced()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "lr": 0.2})
    run.train()
    run.scheduler.step()
    assert run.lrs() == pytest.approx([0.45, 0.18])


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_full_batches_are_undefined_and_never_equilibrated(weight_decay, momentum):
    torch.manual_seed(0)
    x, y = torch.randn(64, 3), torch.randn(64, 1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay
    )
    scheduler = eq.FDRScheduler(optimizer, threshold=0.5)
    for _ in range(40):
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    assert "undefined" in scheduler.last_decision.reason
    assert not scheduler.last_decision.lowered


@pytest.mark.parametrize(
    ("given", "act", "reason"),
    [
        (reading(0.995, 1.0), True, "equilibrated: |L/R − 1| = 0.005 < 0.01"),
        (reading(1.01 + 1e-9, 1.0), False, "not yet: |L/R − 1| = 0.01 ≥ 0.01"),
        (reading(0.0, 0.0), False, "undefined: both sides are zero"),
        (reading(1.0, 0.0), False, "undefined: the right side is zero"),
        (reading(math.nan, 1.0), False, "undefined: non-finite averages"),
        (reading(1.0, 1.0, count=0), False, "undefined: no step has been seen yet"),
        (reading(1.0, 1.0, stderr=0.03, margin=0.06), True, "< 0.01 (standard error 0.03)"),
        (reading(1.04, 1.0, stderr=0.03, margin=0.06), False, "is above 0.01 too, for about 400"),
        (reading(1.20, 1.0, stderr=0.03, margin=0.06), False, "not yet: |L/R − 1| = 0.2 ≥ 0.01"),
    ],
)
def test_the_paper_rule(given, act, reason):
    acts, why = eq.Threshold(0.01).judge(given)
    assert acts is act
    assert reason in why
    assert (given.residual != pytest.approx(0.2)) or "standard error" not in why


@dataclass(frozen=True)
class After:
    """A rule of one's own: act after a number of steps."""

    steps: int = 6

    def judge(self, reading):
        return reading.step >= self.steps, f"{reading.step} steps"


def test_a_rule_of_ones_own_is_asked_saved_and_restored():
    run = Balanced(rule=After(6))
    for expected in (False, True):
        run.train()
        run.scheduler.step()
        assert run.scheduler.last_decision.lowered is expected
    assert run.scheduler.last_decision.reason == "8 steps"
    other = Balanced(rule=After(1))
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    assert other.scheduler.rule == After(6)
    with pytest.raises(ValueError, match="saved with the rule After, this scheduler has Threshold"):
        Balanced().scheduler.load_state_dict(run.scheduler.state_dict())


def test_last_decision_is_the_last_time_that_the_rule_was_asked():
    run = Balanced(min_steps=4, rule=After(100))
    run.train(steps=8)
    run.scheduler.step()
    asked = run.scheduler.last_decision
    for _ in range(3):
        run.train(steps=1)
        run.scheduler.step()
        assert run.scheduler.last_decision is asked
    run.train(steps=1)
    run.scheduler.step()
    assert run.scheduler.last_decision.step == 12


def test_calls_at_every_batch_rarely_wait_for_the_device(monkeypatch):
    run = Balanced(min_steps=50, rule=After(10**6))
    reads = []
    monkeypatch.setattr(
        run.scheduler.monitor, "reading", lambda: reads.append(1) or reading(1, 2, 60)
    )
    for _ in range(400):
        run.train(steps=1)
        run.scheduler.step()
    assert len(reads) == 8


def training(steps, folder=None, state=None, momentum=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    lr = 0.2 * (1 - momentum)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=0.05)
    scheduler = eq.FDRScheduler(optimizer, threshold=0.3, factor=0.7, min_steps=20)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first = 0
    if state is not None:
        first = state["steps"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    decisions = []
    for t in range(first, steps):
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(8, 5, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(
            model(x), x[:, :1] + torch.randn(8, 1, generator=generator)
        ).backward()
        optimizer.step()
        scheduler.step()
        decisions.append((t, repr(scheduler.last_decision)))
    if folder is not None:
        saved = {name: part.state_dict() for name, part in parts.items()} | {"steps": steps}
        torch.save(saved, folder / "checkpoint.pt")
    return decisions, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("stopped", [137, 400])
def test_a_run_stopped_and_resumed_continues_bit_by_bit(tmp_path, momentum, stopped):
    whole, weights = training(900, momentum=momentum)
    training(stopped, tmp_path, momentum=momentum)
    state = torch.load(tmp_path / "checkpoint.pt")  # with the defaults
    resumed, others = training(900, state=state, momentum=momentum)
    assert resumed == whole[stopped:]
    assert all(map(torch.equal, weights, others))
    assert any("lowered=True" in decision for _, decision in whole)


def test_a_copy_continues_with_its_own_optimizer():
    run = Balanced()
    copied = deepcopy(run)
    assert copied.scheduler.monitor.optimizer is copied.optimizer is not run.optimizer
    copied.train()
    copied.scheduler.step()
    assert (copied.lrs(), run.lrs()) == ([pytest.approx(0.45)], [0.5])


@pytest.mark.parametrize("rule", [None, eq.stationarity.Stationary()])
@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable", "ignore:.*single process")
def test_torch_distributed_checkpoint_loads_into_a_scheduler_that_has_just_begun(rule, tmp_path):
    run = Balanced(rule=deepcopy(rule))
    run.train(off=0.5)
    run.scheduler.step()
    dcp.save({"scheduler": run.scheduler.state_dict()}, checkpoint_id=tmp_path)
    other = Balanced(rule=deepcopy(rule))
    state = {"scheduler": other.scheduler.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    other.scheduler.load_state_dict(state["scheduler"])
    assert other.scheduler.monitor.reading() == run.scheduler.monitor.reading()


def test_a_restart_empties_the_window_and_changes_no_rate():
    run = Balanced()
    run.train()
    run.scheduler.restart()
    assert run.scheduler.monitor.reading().count == 0
    assert run.lrs() == [0.5]


def test_get_lr_has_no_side_effects_and_epochs_change_no_decision():
    run = Balanced()
    run.train()
    assert run.scheduler.get_lr() == [0.5]
    assert run.scheduler.monitor.reading().count == 2
    run.scheduler.step(7)
    assert run.scheduler.last_decision.lowered
    assert run.scheduler.last_epoch == 7


def test_steps_that_are_never_seen_are_warned_of_once():
    run = Balanced()
    run.scheduler.detach()
    run.train(steps=60)

    def loop():
        for _ in range(200):
            run.scheduler.step()

    with pytest.warns(UserWarning, match=r"no optimizer step was seen in 50 calls .* eq.measure"):
        loop()
    assert run.lrs() == [0.5]


def test_compiled_steps_are_warned_of_at_the_third_call():
    run = Balanced()
    run.scheduler.step()
    with torch.no_grad():
        run.optimizer.param_groups[0]["params"][0].mul_(0.5)  # as a step without hooks does
    run.scheduler.step()
    with pytest.warns(UserWarning, match=r"no optimizer step was seen.*eq.measure\(optimizer\)"):
        run.scheduler.step()


def test_a_scheduler_that_undoes_a_lowering_is_told_once():
    run = Balanced(factor=0.5)
    other = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)

    def loop():
        for _ in range(6):
            run.train()
            run.scheduler.step()
            other.step()

    with pytest.warns(
        UserWarning, match=r"lowered to 0.25, but something has set it to 0.5"
    ) as told:
        loop()
    assert len(told) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 0.0}, "threshold must be a positive number such as 0.01, got 0.0"),
        ({"threshold": "a"}, "threshold must be a positive number such as 0.01, got 'a'"),
        ({"factor": 1.0}, "factor must lie between 0 and 1, such as 0.9, got 1.0"),
        ({"min_steps": 0}, "min_steps must be a whole number of steps, at least 1, got 0"),
        ({"min_lr": -1.0}, r"min_lr must be one number ≥ 0, or one for each of the 1 .* got -1.0"),
        ({"min_lr": [0.1, 0.2]}, r"one for each of the 1 parameter group\(s\), got \[0.1, 0.2\]"),
        ({"min_lr": "1"}, "min_lr must be one number"),
        ({"rule": After}, r"rule must be an instance, got the class After: pass After\(\)"),
        ({"rule": 3}, r"rule must have a method judge\(reading\), got int"),
        ({"monitor": 3}, "monitor must be an eq.Monitor, got int"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises((ValueError, TypeError), match=message):
        eq.FDRScheduler(optimizer, **arguments)


@pytest.mark.parametrize("loss", [0.3, torch.tensor(0.3)])
def test_a_loss_is_not_taken_for_an_epoch(loss):
    scheduler = eq.FDRScheduler(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(TypeError, match=r"takes no loss, got (float|Tensor): call scheduler.step"):
        scheduler.step(loss)
    assert scheduler.last_epoch == 0


def test_monitors_and_states_of_others_are_refused():
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(n))], lr=0.1) for n in (2, 3))
    with pytest.raises(ValueError, match="monitor watches another optimizer"):
        eq.FDRScheduler(one, monitor=eq.Monitor(other))
    scheduler = eq.FDRScheduler(one)
    with pytest.raises(ValueError, match="not the state of an FDRScheduler: it holds step_size"):
        scheduler.load_state_dict(StepLR(other, 3).state_dict())
    with pytest.raises(ValueError, match="state_dict belongs to another model or optimizer"):
        scheduler.load_state_dict(eq.FDRScheduler(other).state_dict())


def test_states_of_another_kind_of_watcher_are_refused_before_anything_changes():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    monitor, forecaster = eq.Monitor(optimizer), eq.Forecaster(optimizer)
    with pytest.raises(ValueError, match="not the state of a Monitor"):
        monitor.load_state_dict(forecaster.state_dict())
    with pytest.raises(ValueError, match="not the state of a Forecaster"):
        forecaster.load_state_dict(monitor.state_dict())


def test_groups_added_between_steps_trouble_no_rule_and_no_bound():
    run = Balanced(rule=eq.stationarity.Stationary(), min_lr=[0.1])
    run.train()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "lr": 0.2})
    run.scheduler.step()
    run.train()
    run.scheduler.step()
    assert run.lrs() == [0.5, 0.2]


def test_numbers_of_numpy_can_be_loaded(tmp_path):
    settings = {"threshold": np.float64(0.02), "factor": np.float32(0.5), "min_steps": np.int64(7)}
    run = Balanced(**settings)
    torch.save(run.scheduler.state_dict(), tmp_path / "state.pt")
    other = Balanced()
    other.scheduler.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert (other.scheduler.factor, other.scheduler.min_steps) == (0.5, 7)
    assert other.scheduler.rule == eq.Threshold(0.02)


class Author:
    """The rule of the paper's own code: velocities before the step, lists, a check now and then."""

    CHECK, X, Y = 1000, 0.1, 0.5

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.left, self.right, self.lowered = [], [], []

    def before(self):
        [group] = self.optimizer.param_groups
        lr, mu, nu, decay = (group[k] for k in ("lr", "momentum", "dampening", "weight_decay"))
        left = square = 0.0
        for p in group["params"]:
            buffer = self.optimizer.state.get(p, {}).get("momentum_buffer")
            square += 0.0 if buffer is None else buffer.square().sum().item()
            left += (p * (p.grad + decay * p)).sum().item()
        self.left.append(left)
        self.right.append(0.5 * lr * (1 + mu) / (1 - nu) * square)

    def after(self, step):
        t = len(self.left)
        if t % self.CHECK == 0:
            left, right = (
                sum(side[t // 2 :]) / len(side[t // 2 :]) for side in (self.left, self.right)
            )
            if abs(left / right - 1) < self.X:
                self.lowered.append(step)
                self.left, self.right = [], []


def test_the_same_lowerings_as_the_authors_code():
    p = nn.Parameter(torch.full((20,), 2.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.05, momentum=0.5, weight_decay=0.01)
    scheduler = eq.FDRScheduler(
        optimizer, Author.X, 1 - Author.Y, min_steps=500, monitor=eq.Monitor(optimizer, every=1)
    )
    author = Author(optimizer)
    for step in range(1, 5001):
        p.grad = 0.05 * (p.detach() - 1) + torch.randn(20, dtype=torch.float64)
        author.before()
        optimizer.step()
        author.after(step)
        if step % Author.CHECK == 0:
            scheduler.step()
    lowered = [made.step for made in scheduler.decisions if made.lowered]
    assert lowered == author.lowered
    assert 2 <= len(lowered) < 5  # it lowered, and it waited
