"""Loops that do unusual things: readings stay the twin's, or say what they cannot know."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.monitored import FORMS, Loop, fused_step, noisy_gradients, small_model
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

import equilibrate as eq

forms = pytest.mark.parametrize("form", FORMS)
everies = pytest.mark.parametrize("every", [1, 5])
precisions = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)]
)


# Skipped steps --------------------------------------------------------------------------------


@everies
@forms
@precisions
def test_steps_that_gradient_scaling_skips_are_not_counted(dtype, tolerance, form, every):
    """A fused optimizer skips them on the device. The first one creates the buffers."""
    loop = Loop(lambda p: FORMS[form](p, fused=True), every, dtype)
    for step in range(60):
        if step in (7, 8, 20, 33, 47, 48, 49, 59):
            loop.skip()
        else:
            loop.step(lambda: fused_step(loop.optimizer, skip=False))
        if step in (9, 32, 49):
            loop.check(tolerance)
    assert loop.check(tolerance).step == 52


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
@precisions
@pytest.mark.parametrize("how", ["zeroed", "cleared", "loaded"])
def test_a_momentum_buffer_that_is_changed_between_steps(how, dtype, tolerance, every):
    loop = Loop(FORMS["momentum"], every, dtype)
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
    loop.check(tolerance)


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


def test_a_state_that_is_saved_after_a_conversion_begins_again():
    """Before the next measured step, too: the relation of another dtype is another one."""
    loop = Loop(FORMS["momentum"], 16, torch.float32)
    forecaster = eq.Forecaster(loop.optimizer)
    loop.run(40)
    loop.model.bfloat16()
    assert loop.monitor.reading().count > 0
    with forecaster.averaged():
        assert {p.dtype for p in loop.model.parameters()} == {torch.bfloat16}
        assert all(p.isfinite().all() for p in loop.model.parameters())
    state = copy.deepcopy(loop.monitor.state_dict())
    assert forecaster.state_dict()["products"]["taken"] == 0
    other = Loop(FORMS["momentum"], 16, torch.bfloat16)
    other.monitor.load_state_dict(state)
    assert other.monitor.reading().count == 0
    assert other.monitor.step == 40


@everies
@pytest.mark.parametrize("form", ["plain", "momentum"])
def test_parameters_that_are_given_another_shape_begin_a_new_window(form, every):
    theta = nn.Parameter(torch.ones(30))
    optimizer = FORMS[form]([theta])
    watchers = eq.Monitor(optimizer, every=every), eq.Forecaster(optimizer, every=every)
    for size in (30, 10):
        theta.data = torch.ones(size)
        optimizer.state.clear()
        with watchers[1].averaged():
            assert theta.tolist() == [1.0] * size
        for _ in range(2 * every):
            theta.grad = torch.ones(size)
            optimizer.step()
    assert watchers[0].reading().count < 2 * every
    with watchers[1].averaged():
        assert theta.shape == (10,)
        assert theta[0] < 1


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
    forecaster = eq.Forecaster(loop.optimizer, every=4)
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
