"""A random sequence of all that may happen to schedulers, monitors and forecasters.

Two copies of a small model see the same steps. One of them is saved, copied and loaded again and
again, and must give the same readings, forecasts and decisions bit for bit. Readings must agree
with a twin that knows the two sides of every single step, and decisions with what the
documentation says of them.
"""

import copy
import io
import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.naive import Twin
from torch import nn

import equilibrate as eq

FORMS = {
    "plain": (torch.optim.SGD, {"lr": 0.2}),
    "fused SGD": (torch.optim.SGD, {"lr": 0.2, "weight_decay": 0.05, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.6, "weight_decay": 0.05}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.6, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1, "fused": True}),
}
FACTOR, MIN_LR, MIN_STEPS, TOTAL = 0.7, 0.01, 3, 60


class World:
    """A model with a tensor or more in each group, watched and scheduled in one of two ways."""

    def __init__(self, form, groups, every, kind):
        self.making = form, every, kind
        self.groups = [[nn.Parameter(p.clone()) for p in group] for group in groups]
        optimizer, options = FORMS[form]
        self.optimizer = optimizer([{"params": group} for group in self.groups], **options)
        self.monitor = eq.Monitor(self.optimizer, every=every)
        if kind == "fdr":
            self.scheduler = eq.FDRScheduler(
                self.optimizer,
                1.0,
                FACTOR,
                min_lr=MIN_LR,
                min_steps=MIN_STEPS,
                monitor=self.monitor,
            )
            self.forecaster = eq.Forecaster(self.optimizer, every=every)
        else:
            self.scheduler = eq.Cooldown(self.optimizer, TOTAL, warmup_steps=5)
            self.forecaster = self.scheduler.forecaster
        self.loss = 1.0

    @property
    def params(self):
        return [p for group in self.groups for p in group]

    def add_group(self, tensors):
        self.groups.append([nn.Parameter(p.clone()) for p in tensors])
        self.optimizer.add_param_group({"params": self.groups[-1]})

    def state(self, *, in_a_file=False):
        """All that a user would save."""
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "monitor": self.monitor}
        if self.making[2] == "fdr":
            parts["forecaster"] = self.forecaster
        state = {name: part.state_dict() for name, part in parts.items()}
        state["groups"] = [[p.detach() for p in group] for group in self.groups]
        if not in_a_file:
            return copy.deepcopy(state)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file)

    def load(self, state):
        with torch.no_grad():
            for own, saved in zip(self.groups, state["groups"], strict=True):
                for p, value in zip(own, saved, strict=True):
                    p.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.monitor.load_state_dict(state["monitor"])
        if "forecaster" in state:
            self.forecaster.load_state_dict(state["forecaster"])
        elif state["scheduler"]["forecaster"] is not None:
            self.forecaster = self.scheduler.forecaster

    def reloaded(self, *, in_a_file):
        """A new world, as in a new process, that has loaded the state of this one."""
        form, every, kind = self.making
        state = self.state(in_a_file=in_a_file)
        other = World(form, state["groups"], every, kind)
        other.load(state)
        other.loss = self.loss
        return other

    def differentiate(self, noises):
        pairs = list(zip(self.params, noises, strict=True))
        self.loss = sum(float(p.detach().square().sum() + (p.detach() @ z)) for p, z in pairs)
        for p, noise in pairs:
            p.grad = 0.3 * (p.detach() - 1) + noise

    def step(self, *, skip):
        fused = self.optimizer.defaults.get("fused")
        if fused:  # as GradScaler does
            self.optimizer.grad_scale = None
            self.optimizer.found_inf = torch.tensor(float(skip))
        if fused or not skip:
            self.optimizer.step()
        if fused:
            del self.optimizer.grad_scale, self.optimizer.found_inf

    def says(self):
        """Everything that can be read, in words, and the averaged parameters."""
        with self.forecaster.averaged():
            averaged = [p.detach().tolist() for p in self.params]
        readings, found = self.monitor.read(), self.forecaster.forecast(20)
        # In a decay, a forecaster that was loaded has not seen the steps before it.
        forecast = str(found), found.gain, found.after, found.noise
        return repr((readings.whole, readings.groups, forecast, averaged))


class Machine(RuleBasedStateMachine):
    @initialize(
        form=st.sampled_from(sorted(FORMS)),
        every=st.sampled_from([1, 3, 4, 7]),
        kind=st.sampled_from(["fdr", "cooldown"]),
        sizes=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    )
    def begin(self, form, every, kind, sizes):
        self.random = torch.Generator().manual_seed(0)
        self.kind = kind
        groups = [[self.tensor() for _ in range(size)] for size in sizes]
        self.straight, self.resumed = (World(form, groups, every, kind) for _ in range(2))
        self.twin = Twin(self.straight.optimizer, every)
        self.comparable = True  # an edit takes a part of an interval out of the window
        self.moved_unseen = False
        self.just_loaded = False
        self.saved = None

    def tensor(self):
        return torch.randn(2, generator=self.random, dtype=torch.float64)

    def each(self):
        return self.straight, self.resumed

    @rule(skips=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=6))
    def steps(self, skips):
        """Where a step is skipped, GradScaler has found an infinite gradient."""
        for skip in skips:
            skip = skip and len(self.twin.rows) > 0
            noises = [self.tensor() for _ in self.straight.params]
            called = not skip or self.straight.optimizer.defaults.get("fused")
            for world in self.each():
                world.differentiate(noises)
            self.twin.before()
            for world in self.each():
                world.step(skip=skip)
            if called:
                self.twin.after(skipped=skip)
                self.moved_unseen = self.just_loaded = False
            if self.kind == "cooldown" and self.straight.scheduler.last_epoch < TOTAL:
                self.cool_down()

    def cool_down(self):
        scheduler = self.straight.scheduler
        before = [group["lr"] for group in self.straight.optimizer.param_groups]
        for world in self.each():
            world.scheduler.step(world.loss)
        step, start = scheduler.last_epoch, scheduler.last_decision
        after = [group["lr"] for group in self.straight.optimizer.param_groups]
        if not scheduler.is_decaying and step > 5:
            assert after == before
            assert step < TOTAL - TOTAL // 10
        elif scheduler.is_decaying:
            share = (TOTAL - step) / (TOTAL - start.step)
            expected = [share * lr for lr in start.lrs]
            assert after[: len(expected)] == pytest.approx(expected, abs=1e-12)

    @precondition(lambda self: self.kind == "fdr")
    @rule(factor=st.sampled_from([0.5, 2.0, 0.9]), group=st.integers(0, 3))
    def change_lr(self, factor, group):
        for world in self.each():
            groups = world.optimizer.param_groups
            groups[group % len(groups)]["lr"] *= factor

    @precondition(lambda self: not self.just_loaded)  # the model may be loaded after its monitor
    @rule(group=st.integers(0, 3))
    def edit_in_place(self, group):
        group %= len(self.straight.groups)
        for world in self.each():
            with torch.no_grad():
                world.groups[group][0].mul_(1.25)
        self.comparable, self.moved_unseen = False, True

    @precondition(lambda self: len(self.straight.groups) < 4)
    @rule(size=st.integers(1, 2))
    def add_group(self, size):
        tensors = [self.tensor() for _ in range(size)]
        for world in self.each():
            world.add_group(tensors)
        self.restart_twin()
        self.saved = None
        self.moved_unseen = True  # the norm has changed

    @rule()
    def reset(self):
        for world in self.each():
            world.monitor.reset()
            world.forecaster.reset()
        self.restart_twin()

    def restart_twin(self):
        self.twin.reset()
        self.comparable = True

    @rule(how=st.sampled_from(["load", "load", "file", "copy"]))
    def continue_elsewhere(self, how):
        if how == "copy":
            self.resumed = copy.deepcopy(self.resumed)
        else:
            self.resumed = self.resumed.reloaded(in_a_file=how == "file")
        self.just_loaded = True

    @precondition(lambda self: not self.moved_unseen)
    @rule()
    def keep_a_checkpoint(self):
        twin = self.twin.start, list(self.twin.rows)
        self.saved = self.straight.state(), twin, self.straight.loss

    @precondition(lambda self: self.saved is not None)
    @rule()
    def return_to_the_checkpoint(self):
        state, (start, rows), loss = self.saved
        for world in self.each():
            other = world.reloaded(in_a_file=False)  # a decay that has begun ended its forecaster
            other.load(copy.deepcopy(state))
            other.loss = loss
            if world is self.straight:
                self.straight = other
            else:
                self.resumed = other
        self.twin.optimizer = self.straight.optimizer
        self.twin.start, self.comparable = start, False  # parameters are others than those of rows
        self.twin.rows = list(rows)
        self.moved_unseen, self.just_loaded = False, True

    @precondition(lambda self: self.kind == "fdr" and not self.moved_unseen)
    @rule()
    def schedule(self):
        before = [group["lr"] for group in self.straight.optimizer.param_groups]
        made = len(self.straight.scheduler.decisions)
        for world in self.each():
            world.scheduler.step()
        decision, other = (world.scheduler.last_decision for world in self.each())
        assert repr(decision) == repr(other)
        after = [group["lr"] for group in self.straight.optimizer.param_groups]
        if len(self.straight.scheduler.decisions) == made:  # the rule was not asked
            assert after == before
            return
        lowered = [max(FACTOR * lr, min(MIN_LR, lr)) for lr in before]
        act = abs(decision.reading.residual) < 1.0 and not all(map(math.isclose, lowered, before))
        assert decision.lowered is act
        assert after == pytest.approx(lowered if act else before)
        if act:
            self.restart_twin()

    @precondition(lambda self: not self.moved_unseen)
    @rule()
    def read(self):
        assert self.straight.says() == self.resumed.says()
        assert repr(self.straight.scheduler.last_decision) == repr(
            self.resumed.scheduler.last_decision
        )
        reading = self.straight.monitor.reading()
        if not (self.comparable and reading.count):
            return
        left, right = self.twin.expected(reading.count)
        if all(group["lr"] for group in self.straight.optimizer.param_groups):
            assert abs(reading.count - len(self.twin.counted()) / 2) <= 2 * self.twin.every
        size = max(abs(left), right, 1e-9)
        assert reading.right == pytest.approx(right, abs=1e-9 * size)
        assert reading.left == pytest.approx(left, abs=1e-9 * size)

    def teardown(self):
        if hasattr(self, "twin") and not self.moved_unseen:
            self.read()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:step\\(\\) is not called once", "ignore:no optimizer step was seen"
)
def test_whatever_happens_both_worlds_and_the_twin_agree():
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
