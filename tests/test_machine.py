"""A random sequence of all that may happen to a scheduler, against a naive twin.

Two copies of a small model see the same steps. One of them is saved, copied and loaded again and
again, and must give the same readings and decisions bit for bit. Both must agree with a twin that
knows the two sides of every single step, and decides as the documentation says.
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
from support.naive import NaiveSGDSides, SkippingTwin
from torch import nn

import equilibrate as eq

FORMS = {
    "plain": (torch.optim.SGD, {"lr": 0.2}),
    "fused SGD": (torch.optim.SGD, {"lr": 0.2, "weight_decay": 0.05, "fused": True}),
    "momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.6, "dampening": 0.2, "weight_decay": 0.05},
    ),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.6, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1, "fused": True}),
}
SETTINGS = {"factor": 0.7, "min_lr": 0.01, "min_steps": 3}
RELATIVE = 1e-5


class World:
    """A model with one tensor or more in each parameter group, its optimizer and its scheduler."""

    def __init__(self, form, groups, every, threshold):
        self.making = form, every, threshold
        self.groups = [[nn.Parameter(p.clone()) for p in group] for group in groups]
        kind, options = FORMS[form]
        self.optimizer = kind([{"params": group} for group in self.groups], **options)
        self.scheduler = eq.FDRScheduler(
            self.optimizer, threshold=threshold, every=every, **SETTINGS
        )

    @property
    def params(self):
        return [p for group in self.groups for p in group]

    def add_group(self, tensors):
        self.groups.append([nn.Parameter(p.clone()) for p in tensors])
        self.optimizer.add_param_group({"params": self.groups[-1]})

    def state(self, *, in_a_file=False):
        """All that a user would save."""
        state = {
            "groups": [[p.detach() for p in group] for group in self.groups],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
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

    def reloaded(self, *, in_a_file):
        """A new world, as in a new process, that has loaded the state of this one."""
        form, every, threshold = self.making
        state = self.state(in_a_file=in_a_file)
        other = World(form, state["groups"], every, threshold)
        other.load(state)
        return other

    def differentiate(self, noises):
        for p, noise in zip(self.params, noises, strict=True):
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


class Twin:
    """What a scheduler reads and decides, from the sides of every single step."""

    def __init__(self, optimizer, every, threshold):
        self.optimizer, self.every, self.threshold = optimizer, every, threshold
        self.naive = NaiveSGDSides(optimizer)
        self.steps = self.seen = self.decided = 0
        self.windows: list[SkippingTwin] = []
        self.lrs: list[float] = []
        self.restart()

    def restart(self):
        """Begin a new window, with one list of intervals for each parameter group."""
        self.windows = [SkippingTwin(self.optimizer, self.every) for _ in self.current()]
        for window in self.windows:
            window.naive = Sides()  # of one group
        self.lrs = self.current()

    def current(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def before(self, edited):
        for i, (window, lr) in enumerate(zip(self.windows, self.current(), strict=True)):
            window.before(edited=i in edited, changed=lr != self.lrs[i])
        self.lrs = self.current()
        self.naive.before()

    def after(self, *, skip):
        if not skip:
            self.naive.after()
        for window, group in zip(self.windows, self.optimizer.param_groups, strict=True):
            if not skip:
                sides = [self.naive.by_parameter[p] for p in group["params"]]
                window.naive.left.append(sum(left[-1] for left, _ in sides))
                window.naive.right.append(sum(right[-1] for _, right in sides))
            window.after(skipped=skip)
        self.steps += 1

    def read(self):
        """The steps in the window, the mean of L and that of R, summed over the groups."""
        found = [window.read() for window in self.windows if window.intervals]
        if not found:
            return 0, math.nan, math.nan
        right = sum(right for _, _, right in found)
        left = right + sum(difference for _, difference, _ in found)
        return max(steps for steps, _, _ in found), left, right

    def decide(self):
        """Return whether to lower, and the new learning rates."""
        lrs = self.current()
        seen, self.seen = self.seen, self.steps
        if self.seen == seen or self.seen - self.decided < SETTINGS["min_steps"]:
            return False, lrs
        count, left, right = self.read()
        if 0 < count < SETTINGS["min_steps"]:
            return False, lrs
        self.decided = self.seen
        if not (right and abs(left / right - 1) < self.threshold):  # also if it is nan
            return False, lrs
        low = SETTINGS["min_lr"]
        lowered = [max(SETTINGS["factor"] * lr, min(low, lr)) for lr in lrs]
        return not all(map(math.isclose, lowered, lrs)), lowered

    def save(self):
        """A copy of everything but the optimizer."""
        parts = [(w.since_reset, list(w.intervals), copy.copy(w.open)) for w in self.windows]
        return parts, list(self.lrs), (self.steps, self.seen, self.decided)

    def load(self, saved):
        parts, lrs, (self.steps, self.seen, self.decided) = saved
        self.restart()
        for window, (since_reset, intervals, opened) in zip(self.windows, parts, strict=True):
            window.since_reset, window.intervals = since_reset, list(intervals)
            window.open = copy.copy(opened)
        self.lrs = list(lrs)


class Sides:
    """The sides of one parameter group, which someone else fills in."""

    def __init__(self):
        self.left: list[float] = []
        self.right: list[float] = []

    def before(self):
        pass

    def after(self):
        pass


class Machine(RuleBasedStateMachine):
    @initialize(
        form=st.sampled_from(sorted(FORMS)),
        every=st.sampled_from([1, 3, 4, 7]),
        threshold=st.sampled_from([0.2, 1.0, 10.0]),
        sizes=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    )
    def begin(self, form, every, threshold, sizes):
        self.random = torch.Generator().manual_seed(0)
        groups = [[self.tensor() for _ in range(size)] for size in sizes]
        self.straight = World(form, groups, every, threshold)
        self.resumed = World(form, groups, every, threshold)
        self.twin = Twin(self.straight.optimizer, every, threshold)
        self.edited: set[int] = set()
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
            self.one_step(skip=skip and self.twin.steps > 0)

    def one_step(self, *, skip):
        noises = [self.tensor() for _ in self.straight.params]
        called = not skip or self.straight.optimizer.defaults.get("fused")  # only these are stepped
        for world in self.each():
            world.differentiate(noises)
        if called:
            self.twin.before(self.edited)
        for world in self.each():
            world.step(skip=skip)
        if called:
            self.twin.after(skip=skip)
            self.edited, self.moved_unseen, self.just_loaded = set(), False, False

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
        self.edited.add(group)
        self.moved_unseen = True

    @precondition(lambda self: len(self.straight.groups) < 4)
    @rule(size=st.integers(1, 2))
    def add_group(self, size):
        tensors = [self.tensor() for _ in range(size)]
        for world in self.each():
            world.add_group(tensors)
        self.twin.restart()
        self.edited = set()
        self.saved = None
        self.moved_unseen = True  # the norm has changed

    @rule()
    def reset(self):
        for world in self.each():
            world.scheduler.monitor.reset()
        self.twin.restart()

    @rule(how=st.sampled_from(["load", "load", "file", "copy"]))
    def continue_elsewhere(self, how):
        if how == "copy":
            self.resumed = copy.deepcopy(self.resumed)
        else:
            self.resumed = self.resumed.reloaded(in_a_file=how == "file")
        self.just_loaded = True

    @precondition(lambda self: not self.edited)
    @rule()
    def keep_a_checkpoint(self):
        self.saved = self.straight.state(), self.twin.save()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def return_to_the_checkpoint(self):
        state, twin = self.saved
        self.straight.load(copy.deepcopy(state))
        self.resumed.load(copy.deepcopy(state))
        self.twin.load(twin)
        self.edited, self.moved_unseen, self.just_loaded = set(), False, True

    @precondition(lambda self: not self.moved_unseen)  # a warning says that steps were not seen
    @rule()
    def schedule(self):
        expected = self.twin.decide()
        for world in self.each():
            world.scheduler.step()
        decision, other = (world.scheduler.last_decision for world in self.each())
        assert repr(decision) == repr(other)
        assert (decision.lowered, list(decision.lrs)) == (expected[0], pytest.approx(expected[1]))
        assert self.twin.current() == pytest.approx(expected[1])
        if decision.lowered:
            self.twin.restart()

    @precondition(lambda self: not self.moved_unseen)
    @rule()
    def read(self):
        reading, other = (world.scheduler.monitor.reading() for world in self.each())
        assert repr(reading) == repr(other)
        assert repr(self.straight.scheduler.monitor.group_readings()) == repr(
            self.resumed.scheduler.monitor.group_readings()
        )
        count, left, right = self.twin.read()
        assert reading.count == count
        if count:
            size = max(abs(left), right, 1e-9)
            assert reading.right == pytest.approx(right, abs=RELATIVE * size)
            assert reading.left == pytest.approx(left, abs=RELATIVE * size)

    def teardown(self):
        if hasattr(self, "twin") and not self.moved_unseen:
            self.read()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Seems like", "ignore:Detected call")  # of torch, after a copy
def test_whatever_happens_the_scheduler_decides_as_its_twin():
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None)
    )
