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
from torch.utils._python_dispatch import TorchDispatchMode

import equilibrate as eq
from equilibrate._engine.relation.probe import Probe
from equilibrate.rules import Gain, Threshold, Verdict


def reading(left, right, count=100):
    return eq.Reading(step=2 * count, count=count, left=left, right=right, lr=0.1)


class Balanced:
    """A parameter whose sides of FDR1 are equal at every step: θ·g = (η/2) g²."""

    def __init__(self, lrs=(0.5,), **kwargs):
        self.parameters = [nn.Parameter(torch.ones(4)) for _ in lrs]
        groups = [{"params": [p], "lr": lr} for p, lr in zip(self.parameters, lrs, strict=True)]
        self.optimizer = torch.optim.SGD(groups)
        self.scheduler = eq.FDRScheduler(self.optimizer, **{"min_steps": 1, "every": 1, **kwargs})

    def train(self, off=0.0, steps=4):
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                (p,) = group["params"]
                p.data.fill_(1.0)
                p.grad = torch.full((4,), (2 + off) / float(group["lr"]))
            self.optimizer.step()

    def lrs(self):
        return [group["lr"] for group in self.optimizer.param_groups]


def test_it_is_a_torch_scheduler_and_lowers_at_equilibrium():
    run = Balanced(threshold=0.01, factor=0.9)
    assert isinstance(run.scheduler, LRScheduler)
    assert run.scheduler.last_decision.reason == "started: the averaging window begins here"
    run.train(off=0.5)
    run.scheduler.step()
    assert not run.scheduler.last_decision.lowered
    assert run.scheduler.last_decision.reason.startswith("not yet")
    assert run.lrs() == [0.5]
    run.scheduler.monitor.reset()
    run.train()
    run.scheduler.step()
    decision = run.scheduler.last_decision
    assert decision.lowered
    assert decision.lr == run.lrs()[0] == pytest.approx(0.45)
    assert decision.reading.residual == pytest.approx(0, abs=1e-6)
    assert run.scheduler.get_last_lr() == run.lrs()
    assert run.scheduler.monitor.reading().count == 0  # the averages start again


def test_each_group_keeps_its_own_learning_rate():
    run = Balanced(lrs=(0.5, 0.2), factor=0.5)
    run.train()
    run.scheduler.step()
    assert run.lrs() == pytest.approx([0.25, 0.1])
    assert run.scheduler.last_decision.lrs == tuple(run.lrs())
    assert math.isnan(run.scheduler.last_decision.lr)


def test_min_lr():
    run = Balanced(lrs=(0.5, 0.2), factor=0.5, min_lr=[0.3, 0.15])
    run.train()
    run.scheduler.step()
    assert run.lrs() == [0.3, 0.15]
    run.train()
    run.scheduler.step()
    assert run.lrs() == [0.3, 0.15]
    decision = run.scheduler.last_decision
    assert not decision.lowered
    assert decision.reason.endswith("but lr is at min_lr")


def test_a_min_lr_above_the_learning_rate_never_raises_it():
    run = Balanced(lrs=(0.1,), min_lr=0.5)
    run.train()
    run.scheduler.step()
    assert run.lrs() == [0.1]


def test_tensor_learning_rates_are_changed_in_place():
    lr = torch.tensor(0.5)
    run = Balanced(lrs=(lr,), factor=0.5)
    run.train()
    run.scheduler.step()
    assert run.lrs()[0] is lr
    assert float(lr) == 0.25


def test_a_learning_rate_tensor_is_known_as_it_has_rounded_it():
    """0.35 and 0.245 are not numbers of single precision."""
    run, resumed = (Balanced(lrs=(torch.tensor(0.5),), factor=0.7) for _ in range(2))
    run.train()
    run.scheduler.step()
    resumed.optimizer.load_state_dict(deepcopy(run.optimizer.state_dict()))
    resumed.scheduler.load_state_dict(deepcopy(run.scheduler.state_dict()))
    for each in (run, resumed):
        each.train()
        each.scheduler.step()
    assert run.scheduler.last_decision.lrs == resumed.scheduler.last_decision.lrs
    assert torch.equal(run.lrs()[0], resumed.lrs()[0])
    assert run.scheduler.current_lrs() == [run.lrs()[0].item()]


def test_calls_that_change_nothing_do_not_end_an_interval(monkeypatch):
    """torch writes the rate into a tensor at each call, which looks like a change."""
    written = []
    real = Probe._write
    monkeypatch.setattr(Probe, "_write", lambda *a, **k: written.append(0) or real(*a, **k))
    run = Balanced(lrs=(torch.tensor(0.5),), every=16, min_steps=10_000)
    for _ in range(320):
        run.train(steps=1)
        run.scheduler.step()
    assert len(written) < 2 * 320 / 16


def test_a_learning_rate_tensor_that_replaces_another_is_read():
    run = Balanced(lrs=(torch.tensor(0.5),), threshold=1e-9)
    for number in range(50):
        run.train(off=0.5)
        run.scheduler.step()
        lr = 0.1 + number / 100
        run.optimizer.param_groups[0]["lr"] = replaced = torch.tensor(1.0)
        while replaced._version < 2:  # as often as the other one was written to
            replaced.fill_(lr)
        assert run.scheduler.current_lrs() == [pytest.approx(lr)]


def test_it_multiplies_the_current_learning_rate():
    run = Balanced(factor=0.5)
    run.optimizer.param_groups[0]["lr"] = 0.2  # somebody else's doing
    run.train()
    run.scheduler.step()
    assert run.lrs() == [0.1]


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.8 passes it in SequentialLR
def test_it_chains_after_warm_up():
    run = Balanced(lrs=(0.8,), factor=0.5)
    warm_up = LinearLR(run.optimizer, start_factor=0.25, total_iters=3)
    chain = SequentialLR(run.optimizer, [warm_up, run.scheduler], milestones=[3])
    seen, averaged = [], []
    for _ in range(6):
        seen.append(run.lrs()[0])
        run.train()
        chain.step()
        averaged.append(run.scheduler.last_decision.reading.count)
    # The sequence continues with the full rate, as with torch's own schedulers, and the averages
    # start; then each epoch is at equilibrium.
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.4, 0.2])
    assert averaged[3:] == [2, 2, 2]  # half of the four steps since, none of the warm-up's
    assert run.scheduler.last_decision.lowered


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_no_decision_is_made_where_a_sequence_hands_over():
    """`SequentialLR` calls step(0) there in torch 2.8; the window before was not this one's."""
    run = Balanced(factor=0.5, cooldown_end=1000)
    run.train()
    run.scheduler.step(0)
    assert not run.scheduler.judgements
    assert not run.scheduler.cools_down
    assert run.scheduler.last_decision.reason.startswith("started")
    run.train()
    run.scheduler.step()
    assert run.scheduler.last_decision.lowered


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_calls_with_an_epoch_decide_as_those_without():
    run = Balanced(factor=0.5)
    run.train()
    run.scheduler.step(1)
    assert run.scheduler.last_decision.lowered


def test_a_group_added_later_is_lowered_too():
    run = Balanced(factor=0.5, min_lr=0.1)
    run.train()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "lr": 0.16})
    run.train()
    run.scheduler.step()
    assert run.lrs() == [0.25, 0.1]
    each = Balanced(min_lr=[0.1])
    each.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "lr": 0.16})
    each.train()
    with pytest.raises(ValueError, match=r"min_lr must be .* one for each of the 2 parameter"):
        each.scheduler.step()


@pytest.mark.parametrize(
    "settings",
    [
        {"factor": np.sqrt(0.25), "threshold": np.float64(0.01)},
        {"factor": 0.5, "min_lr": np.float32(0.125)},
        {"factor": 0.5, "min_lr": np.array([0.125])},
        {"factor": 0.5, "min_steps": np.int64(2)},
    ],
)
def test_numbers_of_numpy_can_be_loaded(tmp_path, settings):
    run = Balanced(**settings)
    run.train()
    run.scheduler.step()
    assert run.lrs() == [0.25]
    torch.save(run.scheduler.state_dict(), tmp_path / "checkpoint.pt")
    other = Balanced(**settings)
    other.scheduler.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    assert other.scheduler.min_lrs == run.scheduler.min_lrs


def test_undefined_never_lowers():
    run = Balanced()
    run.train()
    run.parameters[0].grad = torch.full((4,), math.nan)
    run.optimizer.step()
    run.scheduler.step()
    assert not run.scheduler.last_decision.lowered
    assert "non-finite" in run.scheduler.last_decision.reason
    still = Balanced()
    for _ in range(3):
        still.parameters[0].grad = torch.zeros(4)
        still.optimizer.step()
    still.scheduler.step()
    assert not still.scheduler.last_decision.lowered
    assert "zero" in still.scheduler.last_decision.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 0.0}, r"threshold must be a positive number such as 0.01, got 0.0"),
        ({"factor": 0.0}, r"factor must lie between 0 and 1, such as 0.9, got 0.0"),
        ({"factor": 1.0}, r"factor must lie between 0 and 1, such as 0.9, got 1.0"),
        ({"threshold": "0.1"}, r"threshold must be a positive number such as 0.01, got '0.1'"),
        ({"factor": "0.9"}, r"factor must lie between 0 and 1, such as 0.9, got '0.9'"),
        ({"factor": None}, r"factor must lie between 0 and 1, such as 0.9, got None"),
        ({"threshold": [0.1]}, r"threshold must be a positive number such as 0.01, got \[0.1\]"),
        ({"min_steps": 0}, "min_steps must be a whole number .* at least 1, got 0"),
        ({"min_steps": 1.5}, "min_steps must be a whole number .* got 1.5"),
        ({"every": 0}, "every must be a whole number of steps, at least 1, got 0"),
        ({"threshold": 0.1, "rule": Threshold()}, "threshold and rule exclude each other"),
        ({"min_lr": -0.1}, "min_lr must be one number ≥ 0"),
        ({"min_lr": "0.1"}, "min_lr must be one number ≥ 0, .* got '0.1'"),
        ({"min_lr": "1"}, "min_lr must be one number ≥ 0, .* got '1'"),
        ({"min_lr": {0.1: "a"}}, "min_lr must be one number ≥ 0, .* got {0.1: 'a'}"),
        ({"min_lr": torch.tensor(0.1)}, r"min_lr must be .* got tensor\(0.1000\)"),
        ({"rule": Gain(), "every": 64}, r"every must be at most 37 .* got 64: .* at least 256"),
        ({"min_lr": [0.1, 0.1]}, r"one for each of the 1 parameter group\(s\), got \[0.1, 0.1\]"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match=message):
        eq.FDRScheduler(optimizer, **arguments)


def test_a_monitor_of_another_optimizer_is_refused():
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    with pytest.raises(ValueError, match="monitor watches another optimizer"):
        eq.FDRScheduler(one, monitor=eq.Monitor(other))
    with pytest.raises(TypeError, match=r"monitor must be an eq.Monitor, got SGD: pass eq.Monitor"):
        eq.FDRScheduler(one, monitor=one)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="every and monitor exclude each other"):
        eq.FDRScheduler(one, monitor=eq.Monitor(one), every=4)
    with pytest.raises(TypeError, match=r"rule must have a method judge\(reading\), got float"):
        eq.FDRScheduler(one, rule=0.01)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"got the class Gain: pass Gain\(\)"):
        eq.FDRScheduler(one, rule=eq.rules.Gain)  # pyright: ignore[reportArgumentType]


def noisy_run(epochs, start=None, momentum=0.9):
    """Train a small model whose learning rate is lowered often; from a checkpoint, if given."""
    torch.manual_seed(5)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.1)
    scheduler = eq.FDRScheduler(optimizer, threshold=0.3, factor=0.8, min_steps=10)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first = 0
    if start is not None:
        for key, part in parts.items():
            part.load_state_dict(start[key])
        first = start["epoch"]
    rates = []
    for epoch in range(first, epochs):
        generator = torch.Generator().manual_seed(epoch)
        for _ in range(20):
            x = torch.randn(8, 6, generator=generator)
            y = torch.randint(3, (8,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        rates.append((optimizer.param_groups[0]["lr"], scheduler.last_decision))
    state = {"epoch": epochs} | {key: part.state_dict() for key, part in parts.items()}
    return rates, torch.cat([p.detach().flatten() for p in model.parameters()]), state


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_run_stopped_and_resumed_goes_on_bit_by_bit(tmp_path, momentum):
    rates, weights, _ = noisy_run(20, momentum=momentum)
    first, _, state = noisy_run(9, momentum=momentum)
    torch.save(state, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt")
    second, resumed_weights, _ = noisy_run(20, start=loaded, momentum=momentum)
    assert first + second == rates
    assert torch.equal(weights, resumed_weights)
    assert sum(decision.lowered for _, decision in rates) >= 3


def test_a_checkpoint_of_another_model_is_refused():
    state = noisy_run(1)[2]["scheduler"]
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = eq.FDRScheduler(other, threshold=0.3, factor=0.8, min_steps=10)
    with pytest.raises(ValueError, match="another model or optimizer"):
        scheduler.load_state_dict(state)


def test_loading_restores_the_settings_as_torch_schedulers_do():
    saved = Balanced(threshold=0.02, factor=0.7, min_lr=0.1, min_steps=3).scheduler.state_dict()
    scheduler = Balanced(threshold=0.5).scheduler
    scheduler.load_state_dict(saved)
    assert scheduler.rule == Threshold(0.02)
    assert (scheduler.factor, scheduler.min_lr, scheduler.min_steps) == (0.7, 0.1, 3)


@dataclass(frozen=True)
class After:
    """A rule as a user would write it."""

    steps: int

    def judge(self, reading):
        return Verdict(reading.count >= self.steps, f"{reading.count} steps averaged")


def test_a_rule_of_ones_own():
    run = Balanced(rule=After(steps=4))
    run.train(off=3.0)
    run.scheduler.step()
    assert not run.scheduler.last_decision.lowered
    run.train(off=3.0)
    run.scheduler.step()
    assert run.scheduler.last_decision.lowered
    assert run.scheduler.last_decision.reason == "4 steps averaged"
    with pytest.raises(ValueError, match="saved with the rule After, this scheduler has Threshold"):
        Balanced().scheduler.load_state_dict(run.scheduler.state_dict())


def test_stepping_at_every_batch_is_safe_by_default():
    run = Balanced(min_steps=100)
    for _ in range(250):
        run.train(steps=1)
        run.scheduler.step()
        assert run.lrs() == [0.5] or run.scheduler.monitor.step >= 199
    reasons = run.scheduler.last_decision.reason
    assert run.lrs() == [pytest.approx(0.45)]
    assert reasons == "too few steps: the next check is due at step 299"


@pytest.mark.parametrize("clipped", [False, True])
def test_calls_at_every_batch_rarely_wait_for_the_device(clipped, monkeypatch):
    """Parameters that are edited after each step leave few steps in the window for a long time."""
    readings = []
    real = eq.Monitor.reading
    monkeypatch.setattr(eq.Monitor, "reading", lambda self: readings.append(0) or real(self))
    run = Balanced(every=16, min_steps=100, factor=0.5)
    calls = 3500 if clipped else 400
    for _ in range(calls):
        run.train(steps=1)
        if clipped:
            with torch.no_grad():
                run.parameters[0].clamp_(-9, 9)
        run.scheduler.step()
    first = run.scheduler.judgements[0]
    assert first.step == (3168 if clipped else 208)  # the first at which there are 100
    assert len(readings) < calls / 40


def test_a_resumed_run_gives_the_same_reasons_at_every_batch():
    def reasons(run, steps):
        for _ in range(steps):
            run.train(steps=1)
            run.scheduler.step()
            yield run.scheduler.last_decision.reason

    run = Balanced(every=16, min_steps=100, factor=0.5)
    assert list(reasons(run, 150))[-1] == "too few steps: the next check is due at step 187"
    resumed = Balanced(every=16, min_steps=100, factor=0.5)
    resumed.optimizer.load_state_dict(run.optimizer.state_dict())
    resumed.scheduler.load_state_dict(run.scheduler.state_dict())
    assert list(reasons(resumed, 150)) == list(reasons(run, 150))


def test_a_reason_is_not_that_of_an_earlier_call():
    run = Balanced(every=16, min_steps=100)
    run.train(steps=100)
    run.scheduler.step()
    run.scheduler.step()
    assert run.scheduler.last_decision.reason.startswith("no optimizer step was seen")
    run.train(steps=1)
    run.scheduler.step()
    assert run.scheduler.last_decision.reason.startswith("too few steps: the next check is due at")


class Reads(TorchDispatchMode):
    """Counts how often a number is read from a tensor, which waits for its device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_learning_rate_tensor_is_read_only_if_somebody_has_changed_it():
    theta = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([theta], lr=torch.tensor(0.5), foreach=False)
    scheduler = eq.FDRScheduler(optimizer, threshold=1e-9, min_steps=50, cooldown_end=100)
    counts = []
    for step in range(100):
        theta.grad = torch.randn(4)
        optimizer.step()
        if step == 20:
            optimizer.param_groups[0]["lr"].mul_(0.5)
        with Reads() as reads:
            scheduler.step()
        counts.append(reads.count)
        assert scheduler.get_last_lr()[0].item() == pytest.approx(scheduler.last_decision.lr)
    assert counts[:49] == [1] + 19 * [0] + [1] + 28 * [0]
    assert counts[90:] == 10 * [0]  # in the cooldown
    assert scheduler.last_decision.lr == 0


@pytest.mark.parametrize("loss", [0.5, torch.tensor(0.5), np.float32(0.5), np.array(0.5)])
def test_a_loss_is_ignored_by_a_rule_that_needs_none(loss):
    run = Balanced()
    run.train()
    run.scheduler.step(loss)
    assert run.scheduler.last_decision.lowered
    assert run.scheduler.last_epoch == 1
    assert run.scheduler.last_decision.reading.losses is None


def test_an_int_is_taken_for_an_epoch():
    run = Balanced()
    run.train()
    with pytest.warns(UserWarning, match="epoch parameter"):
        run.scheduler.step(7)
    assert run.scheduler.last_epoch == 7
    run.train()
    with pytest.warns(UserWarning, match="epoch parameter"):
        run.scheduler.step(0.5, epoch=9)
    assert run.scheduler.last_epoch == 9


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (torch.ones(2), r"a tensor of shape \(2,\) and dtype torch.float32"),
        (torch.tensor(3), r"a tensor of shape \(\) and dtype torch.int64"),
        ("0.5", "str"),
        (True, "bool"),
        ([0.5], "list"),
    ],
)
def test_what_is_no_loss(loss, what):
    with pytest.raises(TypeError, match=f"loss must be a number or .* got {what}: pass"):
        Balanced().scheduler.step(loss)


def test_a_rate_that_differs_from_min_lr_by_rounding_alone_is_not_lowered():
    run = Balanced(lrs=(0.1 * 0.9,), factor=0.9, min_lr=0.09)
    run.train()
    run.scheduler.step()
    assert not run.scheduler.last_decision.lowered
    assert run.scheduler.last_decision.reason.endswith("but lr is at min_lr")


def test_the_representation_tells_rule_and_reason():
    run = Balanced()
    assert repr(run.scheduler).startswith("FDRScheduler(Threshold(threshold=0.01), factor=0.9, 'st")
    assert repr(run.scheduler.monitor) == "Monitor(SGD, every=1, step=0)"


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_full_batches_are_undefined_and_never_equilibrated(weight_decay, momentum):
    """At the minimum only rounding errors are left, whose ratio may come close to 1 by chance."""
    model, inputs, targets = nn.Linear(5, 2), torch.randn(64, 5), torch.randn(64, 2)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay
    )
    scheduler = eq.FDRScheduler(optimizer)
    for _ in range(15):
        for _ in range(200):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        scheduler.step()
        assert not scheduler.last_decision.lowered
    assert "both sides are zero" in scheduler.last_decision.reason


def test_get_lr_has_no_side_effects():
    run = Balanced()
    run.train()
    before = run.scheduler.state_dict()["decision"]
    assert run.scheduler.get_lr() == run.scheduler.get_lr() == [0.5]
    assert run.scheduler.state_dict()["decision"] == before
    run.scheduler.step()
    assert run.scheduler.get_lr() == run.lrs()


def test_no_step_since_the_last_call_is_said():
    run = Balanced()
    run.train()
    run.scheduler.step()
    run.scheduler.step()
    assert not run.scheduler.last_decision.lowered
    assert run.scheduler.last_decision.reason.startswith("no optimizer step was seen")


def test_a_restart_empties_the_window_and_changes_no_rate():
    run = Balanced(rule=eq.rules.Gain())
    run.train(steps=20)
    run.scheduler.step(0.5)
    assert run.scheduler.last_decision.reading.losses.values == (0.5,)
    run.scheduler.restart()
    assert run.scheduler.monitor.reading().count == 0
    run.train(steps=20)
    run.scheduler.step(0.25)
    judged = run.scheduler.last_decision.reading
    assert judged.count == 10
    assert (judged.losses.start, judged.losses.values) == (20, (0.25,))
    assert "20 of" in judged.forecasts[0].undefined
    assert run.lrs() == [0.5]


@pytest.mark.parametrize("rule", [Threshold(), eq.rules.Stationary(), eq.rules.Gain()])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # of torch 2.8 itself
def test_torch_distributed_checkpoint_loads_into_a_scheduler_that_has_just_begun(rule, tmp_path):
    runs = [Balanced(rule=rule) for _ in range(2)]
    for _ in range(30):
        runs[0].train(off=0.5)
        runs[0].scheduler.step(0.5)
    dcp.save({"scheduler": runs[0].scheduler}, checkpoint_id=tmp_path)
    dcp.load({"scheduler": runs[1].scheduler}, checkpoint_id=tmp_path)
    for run in runs:
        run.train(off=0.5)
        run.scheduler.step(0.25)
    one, other = (run.scheduler.last_decision for run in runs)
    assert one == other
    assert one.reading.losses == other.reading.losses
    assert str(one.reading.forecasts) == str(other.reading.forecasts)


def test_a_learning_rate_of_zero_is_named():
    run = Balanced()
    run.optimizer.param_groups[0]["lr"] = 0.0
    run.optimizer.step()
    run.scheduler.step()
    assert run.scheduler.last_decision.reason.startswith("lr is 0 in every parameter group")


def test_detached_schedulers_do_not_lower():
    run = Balanced()
    run.scheduler.detach()
    run.train()
    run.scheduler.step()
    assert run.scheduler.last_decision.reason.startswith("no optimizer step was seen")
    assert run.lrs() == [0.5]


def test_the_state_of_another_scheduler_is_refused():
    run = Balanced()
    other = StepLR(run.optimizer, step_size=1).state_dict()
    with pytest.raises(
        ValueError, match=r"not the state of an FDRScheduler: it holds step_size, gamma"
    ):
        run.scheduler.load_state_dict(other)
    with pytest.raises(ValueError, match=r"it holds nothing; pass what scheduler\.state_dict"):
        run.scheduler.load_state_dict({})
