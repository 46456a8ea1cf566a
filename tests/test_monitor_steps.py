"""Steps within steps, errors, compiled steps, wrappers and lifetimes."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from support.monitored import FORMS, Loop, decayed, noisy_gradients, small_model
from support.naive import Twin
from torch import nn
from torch.optim import SGD, Adam

import equilibrate as eq

forms = pytest.mark.parametrize("form", FORMS)
everies = pytest.mark.parametrize("every", [1, 5])


# Steps within steps, and errors -------------------------------------------------------------------


def fail():
    raise InterruptedError


class Descent(torch.optim.Optimizer):
    """Gradient descent."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        if closure is not None:
            closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"])


@everies
@pytest.mark.parametrize("fails", ["before", "inside", "after"])
@pytest.mark.parametrize("used", [False, True])
def test_a_step_that_calls_its_parents_counts_once_after_an_error_too(used, fails, every):
    """It is raised before the inner step, inside it, and after it.

    Torch calls hooks around the steps of those classes alone of which there was an instance.
    """
    parent = type("Parent", (Descent,), {"step": copy.copy(Descent.__dict__["step"])})
    if used:
        parent([nn.Parameter(torch.ones(1))], lr=0.1)
    loop = Loop(lambda p: decayed(parent)(p, lr=0.1), every)
    loop.run(17)
    for _ in range(3):
        loop.backward()
        loop.optimizer.fails = fails  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(InterruptedError):
            loop.optimizer.step(fail if fails == "inside" else None)
        loop.optimizer.fails = ""  # pyright: ignore[reportAttributeAccessIssue]
        assert loop.monitor.step == len(loop.twin.rows)
        loop.step()
        assert loop.monitor.step == len(loop.twin.rows)
    for each in (loop.monitor, loop.twin):
        each.reset()
    loop.run(30)
    assert loop.check(1e-9).step == 50


@everies
@pytest.mark.parametrize("at", [0, 5, 8])
@forms
def test_training_continues_after_a_closure_has_raised(form, at, every):
    loop = Loop(FORMS[form], every)
    loop.run(at)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            loop.optimizer.step(fail)
    loop.run(30 - at)
    assert loop.check(1e-9).step == 30


@everies
@pytest.mark.parametrize("moved", [False, True])
def test_an_error_inside_measure(moved, every):
    loop = Loop(FORMS["momentum"], every)
    loop.run(7)

    @torch.no_grad()
    def move_and_fail():
        if moved:
            loop.model[0].weight.mul_(0.5)  # pyright: ignore[reportIndexIssue]
            loop.twin.edit()
        fail()

    with pytest.raises(InterruptedError), eq.measure(loop.optimizer):
        move_and_fail()
    loop.run(23)
    assert loop.check(1e-9).step == 30


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_a_step_that_creates_the_state_to_be_saved_is_not_counted(zero):
    """As torch.distributed.checkpoint makes it with an optimizer that has no state yet."""
    loop = Loop(FORMS["plain"], 4)
    for _ in range(3):
        loop.optimizer.zero_grad(set_to_none=False)
        loop.optimizer.param_groups[0]["lr"] = zero
        loop.optimizer.step()
        loop.optimizer.param_groups[0]["lr"] = 0.05
        loop.twin.edit()  # it increases the version counters of the parameters
        loop.run(5)
    assert loop.check(1e-9).step == 15


# Steps that hooks do not see ----------------------------------------------------------------------

# Dynamo imports deprecated parts of torch when it is first used.
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@compiles
@pytest.mark.parametrize("form", ["momentum", "AdamW"])
def test_measure_shows_a_compiled_step_to_all_watchers(form):
    torch._dynamo.reset()
    loop = Loop(FORMS[form], 4)
    forecaster = eq.Forecaster(loop.optimizer, every=4)
    step = torch.compile(loop.optimizer.step, backend="eager")

    def measured():
        with eq.measure(loop.optimizer):
            step()

    for _ in range(70):
        loop.step(measured)
        forecaster.update(1.0)
    assert loop.monitor.step == forecaster.step == 70
    loop.check(1e-9)
    assert forecaster.forecast(16).undefined is None


def test_an_eager_step_inside_measure_counts_once():
    loop = Loop(FORMS["momentum"], 4)

    def measured():
        with eq.measure(loop.optimizer):
            loop.optimizer.step()

    for _ in range(20):
        loop.step(measured)
    assert loop.check(1e-9).step == 20


@compiles
def test_unseen_steps_are_reported():
    torch._dynamo.reset()
    loop = Loop(FORMS["plain"], 4)
    step = torch.compile(loop.optimizer.step, backend="eager")
    for _ in range(3):
        loop.backward()
        step()
    assert loop.monitor.step == 0
    with pytest.warns(UserWarning, match=r"no optimizer step was seen.*eq.measure\(optimizer\)"):
        assert loop.monitor.reading().undefined == "no step has been seen yet"
    assert loop.monitor.reading().count == 0  # said once


# Wrappers, several watchers, lifetimes ------------------------------------------------------------


class WrappedOptimizer(torch.optim.Optimizer):
    """As in accelerate: an optimizer by its class, that only holds another one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.optimizer.step(closure)


def test_a_wrapped_optimizer():
    loop = Loop(FORMS["momentum"], 4)
    wrapped = WrappedOptimizer(loop.optimizer)
    loop.monitor = eq.Monitor(wrapped, loop.model, every=4)
    assert loop.monitor.optimizer is loop.optimizer
    for _ in range(16):
        loop.step(wrapped.step)
    loop.check(1e-9)


def test_two_optimizers_on_one_model():
    """Steps of the other optimizer on the same parameters are edits for this one."""
    one, two = (nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(2))
    first = SGD([one], lr=0.1)
    second = SGD([one, two], lr=0.05, momentum=0.9)
    pairs = [(o, eq.Monitor(o, every=4), Twin(o, 4)) for o in (first, second)]
    for _ in range(32):
        for optimizer, _, twin in pairs:
            noisy_gradients([one, two])
            twin.edit()
            twin.before()
            optimizer.step()
            twin.after()
    for _, monitor, twin in pairs:
        reading = monitor.reading()
        expected = twin.expected(reading.count)
        assert (reading.left, reading.right) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("make", [eq.Monitor, eq.FDRScheduler])
def test_a_notebook_cell_that_is_run_again_frees_the_old_object(make):
    optimizer = SGD(small_model().parameters(), lr=0.1)
    current = make(optimizer)
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    counted = [len(each) for each in hooks]
    for _ in range(3):
        old = weakref.ref(current)
        current = make(optimizer)
        noisy_gradients(optimizer.param_groups[0]["params"])
        optimizer.step()
        gc.collect()
        assert old() is None
        assert [len(each) for each in hooks] == counted


def test_reset_and_detach():
    loop = Loop(FORMS["plain"], 1)
    assert loop.monitor.reading().undefined == "no step has been seen yet"
    loop.run(10)
    loop.monitor.reset()
    assert (loop.monitor.reading().step, loop.monitor.reading().count) == (10, 0)
    assert loop.monitor.since_reset == 0
    loop.run(4)
    before = loop.monitor.reading()
    assert (before.step, before.count) == (14, 2)
    loop.monitor.detach()
    for _ in range(4):
        loop.backward()
        loop.optimizer.step()
    assert loop.monitor.reading() == before


def test_non_finite_gradients_are_reported_and_leave_with_the_window():
    p = nn.Parameter(torch.ones(2))
    optimizer = SGD([p], lr=0.1)
    monitor = eq.Monitor(optimizer, every=1)
    for t in range(8):
        p.grad = torch.full((2,), float("nan") if t == 2 else 1.0)
        before = p.detach().clone()
        optimizer.step()
        with torch.no_grad():
            p.copy_(before)
        if t == 3:
            assert "non-finite" in str(monitor.reading().undefined)
    assert monitor.reading().undefined is None


def test_a_learning_rate_tensor_that_is_changed_after_the_step():
    p, lr = nn.Parameter(torch.ones(2)), torch.tensor(0.5, dtype=torch.float64)
    optimizer = Adam([p], lr=lr, foreach=False)
    monitor = eq.Monitor(optimizer, every=1)
    p.grad = torch.ones(2)
    optimizer.step()
    before = monitor.reading()
    lr.zero_()
    assert monitor.reading() == before
    assert before.right == pytest.approx(2 * 0.5**2 / (2 * 0.5), rel=1e-6)


def test_the_default_device_may_be_another_one_than_that_of_the_model():
    """With `torch.set_default_device("cuda")` numbers that stay on the host must not go there."""
    loop = Loop(FORMS["momentum"], 2)
    with torch.device("meta"):  # nothing can be read from there
        monitor = eq.Monitor(loop.optimizer, loop.model, every=2)
        for _ in range(140):
            noisy_gradients(loop.model.parameters())
            loop.optimizer.step()
        monitor.load_state_dict(monitor.state_dict())
        assert monitor.layers().layers[0].rotation.samples
    assert monitor.reading() == loop.monitor.reading()
