"""Loops that do unusual things: readings stay the twin's, or say what they cannot know."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.monitored import DecayedSGD, Loop, fused_step, small_model
from support.naive import Twin
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.swa_utils import AveragedModel

import equilibrate as eq

FORMS = {
    "plain": lambda p, **k: SGD(p, lr=0.05, weight_decay=0.05, **k),
    "momentum": lambda p, **k: SGD(p, lr=0.05, momentum=0.9, **k),
    "dampening": lambda p, **k: SGD(p, lr=0.05, momentum=0.9, dampening=0.2, **k),
    "nesterov": lambda p, **k: SGD(p, lr=0.05, momentum=0.9, nesterov=True, **k),
    "AdamW": lambda p, **k: AdamW(p, lr=1e-2, **k),
}
forms = pytest.mark.parametrize("form", FORMS)
everies = pytest.mark.parametrize("every", [1, 5])


def noisy_gradients(params):
    for p in params:
        p.grad = 0.3 * (p.detach() - 1) + torch.randn_like(p)


# Skipped steps --------------------------------------------------------------------------------


@everies
@forms
def test_steps_that_gradient_scaling_skips_are_not_counted(form, every):
    """A fused optimizer skips them on the device. The first one creates the buffers."""
    loop = Loop(lambda p: FORMS[form](p, fused=True), every)
    for step in range(60):
        if step in (7, 8, 20, 33, 47, 48, 49, 59):
            loop.skip()
        else:
            loop.step(lambda: fused_step(loop.optimizer, skip=False))
        if step in (9, 32, 49):
            loop.check(1e-9)
    assert loop.check(1e-9).step == 52


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling_itself(fused):
    loop = Loop(lambda p: FORMS["momentum"](p, fused=fused), 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)

    def scaled(factor):
        generator = loop.generator.get_state()
        loop.backward()  # the twin's gradients; then the same ones, scaled
        loop.twin.before()
        loop.generator.set_state(generator)
        seen = loop.monitor.step
        loop.optimizer.zero_grad()
        x, y = (torch.randn(4, n, generator=loop.generator).double() for n in (6, 3))
        loss = nn.functional.mse_loss(loop.model(x), y)
        scaler.scale(factor * loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        if loop.monitor.step > seen:  # without a fused kernel a skipped step calls no hook
            loop.twin.after(skipped=factor != 1)

    for step in range(40):
        scaled(torch.inf if step in (12, 30, 31) else 1.0)
    assert loop.check(1e-9).step == 37


# Edits ----------------------------------------------------------------------------------------


@everies
@forms
def test_clamps_between_steps_end_an_interval(form, every):
    loop = Loop(FORMS[form], every)
    for step in range(60):
        loop.step()
        if step in (21, 22, 40):
            with torch.no_grad():
                for p in loop.model.parameters():
                    p.clamp_(-0.2, 0.2)
            loop.twin.edit()
    loop.check(1e-9)


@everies
@pytest.mark.parametrize("how", ["zeroed", "cleared", "loaded"])
def test_a_momentum_buffer_that_is_changed_between_steps(how, every):
    loop = Loop(FORMS["momentum"], every)
    loop.run(20)
    saved = copy.deepcopy(loop.optimizer.state_dict())
    loop.run(17)
    if how == "zeroed":
        for state in loop.optimizer.state.values():
            state["momentum_buffer"].zero_()
    elif how == "cleared":
        loop.optimizer.state.clear()
    else:
        loop.optimizer.load_state_dict(saved)  # without the model
    loop.twin.edit()
    loop.run(30)
    loop.check(1e-9)


@everies
@pytest.mark.parametrize("form", ["plain", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_is_converted_begins_a_new_window(form, dtype, every):
    loop = Loop(FORMS[form], every, torch.float32)
    loop.run(21)
    loop.model.to(dtype)
    while not loop.twin.is_measured(len(loop.twin.rows)):  # noticed at the next measured step
        loop.step()
    loop.twin.reset()
    loop.run(40)
    loop.check(1e-6 if dtype is torch.float64 else 1e-5)


@everies
def test_parameters_that_are_given_new_memory(every):
    loop = Loop(FORMS["plain"], every)
    loop.run(10)
    params = list(loop.model.parameters())
    nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(params).detach(), params)
    loop.twin.edit()
    loop.run(21)
    loop.check(1e-9)


@everies
@pytest.mark.parametrize("act", ["clear gradients", "clamp weights"])
def test_a_hook_registered_earlier_does_not_spoil_the_reading(act, every):
    loop = Loop(FORMS["momentum"], every)
    loop.monitor.detach()

    @torch.no_grad()
    def hook(*_):
        loop.twin.after()
        if act == "clear gradients":
            loop.optimizer.zero_grad(set_to_none=True)
        else:
            for p in loop.model.parameters():
                p.clamp_(-0.5, 0.5)
            loop.twin.edit()

    loop.optimizer.register_step_post_hook(hook)
    loop.monitor = eq.Monitor(loop.optimizer, loop.model, every=every)
    for _ in range(40):
        loop.backward()
        loop.twin.before()
        loop.optimizer.step()
    loop.check(1e-9)


@everies
def test_edits_through_data_are_reported(every):
    """They leave no trace that could be noticed without reading the parameters."""
    loop = Loop(FORMS["momentum"], every, torch.float32)
    for _ in range(40):
        loop.step()
        for p in loop.model.parameters():
            p.data.clamp_(-0.1, 0.1)
    with pytest.warns(UserWarning, match=r"changed between two optimizer steps .* torch.no_grad"):
        loop.monitor.reading()


def test_an_average_of_the_weights_is_no_edit():
    loop = Loop(FORMS["plain"], 4)
    average = AveragedModel(loop.model)
    forecaster = eq.Forecaster(loop.optimizer, horizons=[16], every=4)
    for _ in range(24):
        loop.step()
        average.update_parameters(loop.model)
        copy.deepcopy(loop.model.state_dict())
        with forecaster.averaged(loop.model):
            loop.monitor.reading()
    loop.check(1e-9)
    assert len(loop.twin.counted()) > 20


@given(
    st.lists(
        st.one_of(
            *[st.just("step")] * 6,
            st.sampled_from(["edit", "reset", "save", "skip"]),
            st.sampled_from([0.5, 1.3, 0.98]),
            st.sampled_from([("momentum", m) for m in (0.0, 0.5, 0.9)]),
        ),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 20),
    st.sampled_from(list(FORMS)),
)
@settings(max_examples=80)
def test_whatever_happens_between_steps_the_reading_is_the_twins(script, every, form):
    model = nn.ParameterList([nn.Parameter(torch.ones(3, 2).double()) for _ in range(3)])
    loop = Loop(lambda p: FORMS[form](p, fused=True), every, model=model)
    group = loop.optimizer.param_groups[0]
    resumed = eq.Monitor(loop.optimizer, model, every=every)
    for event in ["step", *script, "step"]:
        if event == "edit":
            with torch.no_grad():
                model[0].mul_(1.5)
            loop.twin.edit()
        elif event == "reset":
            for each in (loop.monitor, resumed, loop.twin):
                each.reset()
        elif event == "save":
            state = resumed.state_dict()
            resumed.detach()
            resumed = eq.Monitor(loop.optimizer, model, every=1)
            resumed.load_state_dict(state)
        elif isinstance(event, float):
            group["lr"] *= event
        elif isinstance(event, tuple):
            if form == "plain" or (form == "momentum" and event[1]):
                group["momentum"] = event[1]
        else:
            noisy_gradients(model)
            loop.twin.before()
            # A buffer that is created within a skipped step holds whatever was in memory.
            buffer = loop.optimizer.state[model[0]].get("momentum_buffer")
            skipped = event == "skip" and not (group.get("momentum") and buffer is None)
            fused_step(loop.optimizer, skip=skipped)
            loop.twin.after(skipped=skipped)
    reading = loop.monitor.reading()
    assert repr(resumed.read().layers().row()) == repr(loop.monitor.read().layers().row())
    if reading.undefined is None:
        loop.check(1e-8)
    else:
        assert not reading.count or loop.twin.expected(reading.count)[1] == 0


# Tensors without gradients ----------------------------------------------------------------------


@everies
@forms
def test_tensors_without_gradients_at_some_steps(form, every):
    loop = Loop(FORMS[form], every)
    loop.run(8)
    for step in range(12):  # looks like an edit at first, and costs an interval
        loop.step(without=[step % 4])
    for each in (loop.monitor, loop.twin):
        each.reset()
    for step in range(45):
        loop.step(without=[[], [0], [1, 3], [0, 1, 2, 3]][step % 4])
    loop.check(1e-9)


@everies
@forms
def test_a_tensor_that_never_has_a_gradient(form, every):
    loop = Loop(FORMS[form], every)
    for _ in range(40):
        loop.step(without=[1])
    loop.check(1e-9)
    assert len(loop.twin.counted()) > 30


@everies
def test_a_tensor_that_joins_late_with_dampening(every):
    """Its first step is undampened: the steps since the last measurement are not counted."""
    loop = Loop(FORMS["dampening"], every)
    for _ in range(22):
        loop.step(without=[0])
    before = loop.monitor.reading()
    loop.check(1e-9)
    loop.run(1)
    assert loop.monitor.reading().right == before.right
    for each in (loop.monitor, loop.twin):
        each.reset()
    loop.run(30)
    loop.check(1e-9)


# Added groups, exchanged parameters ---------------------------------------------------------------


@everies
@pytest.mark.parametrize("how", ["a group", "a new entry"])
def test_parameters_that_are_added_or_exchanged_begin_a_new_window(how, every):
    extra = nn.Linear(3, 3).double()
    model = nn.Sequential(small_model(torch.float64), extra)
    loop = Loop(lambda p: SGD(p[:4], lr=0.1), every, model=model)
    loop.run(20)
    if how == "a group":
        loop.optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.2})
    else:
        loop.optimizer.param_groups[0]["params"][-1] = extra.bias
        while not loop.twin.is_measured(len(loop.twin.rows)):  # noticed at the next measured step
            loop.step()
    loop.twin.reset()
    loop.run(20)
    assert loop.check(1e-9).step == len(loop.twin.rows)


# Steps within steps, and errors -------------------------------------------------------------------


def fail():
    raise InterruptedError


@everies
@pytest.mark.parametrize("fails", ["before", "inside", "after"])
def test_a_step_that_calls_its_parents_counts_once_after_an_error_too(fails, every):
    """It is raised before the inner step, inside it, and after it."""
    loop = Loop(lambda p: DecayedSGD(p, lr=0.1), every)
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
    with pytest.raises(InterruptedError), eq.measure(loop.optimizer):
        if moved:
            with torch.no_grad():
                loop.model[0].weight.mul_(0.5)  # pyright: ignore[reportIndexIssue]
            loop.twin.edit()
        fail()
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
    forecaster = eq.Forecaster(loop.optimizer, horizons=[16], every=4)
    step = torch.compile(loop.optimizer.step, backend="eager")

    def measured():
        with eq.measure(loop.optimizer):
            step()

    for _ in range(70):
        loop.step(measured)
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
