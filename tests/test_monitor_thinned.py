"""Readings with `every` above 1 against a twin that knows both sides of every single step."""

import io
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.monitored import SGD_FORMS, small_model
from support.naive import ThinnedTwin
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR

import equilibrate as eq

EXACT = 1e-5
OTHERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-2),
}
if not hasattr(torch.optim, "Muon"):  # torch 2.8
    del OTHERS["Muon"]


def gradients(params, generator, scale=1.0):
    """Noisy gradients of a quadratic with its minimum at 1."""
    for p in params:
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        p.grad = scale * (0.3 * (p.detach() - 1) + noise)


def assert_is_twins(reading, twin, relative=EXACT):
    count, difference, right = twin.read()
    assert reading.count == count
    assert reading.right == pytest.approx(right, rel=relative)
    assert reading.difference == pytest.approx(difference, abs=relative * right)
    assert_has_twins_error_bar(reading, twin, relative)


def assert_has_twins_error_bar(reading, twin, relative=EXACT):
    stderr, margin = twin.error_bar()
    assert reading.stderr == pytest.approx(stderr, rel=1e-3, abs=relative, nan_ok=True)
    assert reading.margin == pytest.approx(margin, rel=1e-3, abs=relative, nan_ok=True)


def run(optimizer, twin, steps, on_step=None, scale=1.0, seed=1):
    generator = torch.Generator().manual_seed(seed)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for t in range(steps):
        gradients(params, generator, scale)
        twin.before()
        optimizer.step()
        twin.after()
        if on_step:
            on_step(t)


@pytest.mark.parametrize("every", [2, 5, 16])
@pytest.mark.parametrize("form", SGD_FORMS)
def test_sgd_equals_the_twin_over_the_same_steps(form, every):
    model = small_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0
    asked = (0, 6, 17, 40, 79)

    def compare(t):
        if t in asked:
            assert_is_twins(monitor.reading(), twin, 1e-9)

    run(optimizer, twin, 80, compare, scale=sign)


@pytest.mark.parametrize("every", [2, 5, 16])
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_equal_the_twin_over_the_same_steps(name, every):
    model = small_model().double()
    optimizer = OTHERS[name](model.parameters())
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    run(optimizer, twin, 80)
    assert_is_twins(monitor.reading(), twin)


@pytest.mark.parametrize("form", SGD_FORMS)
def test_single_precision_loses_only_the_rounding_of_the_parameters(form):
    """Each rounding of θ moves N by some 1e-7 N; over a window they add up to no more than that."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
    monitor, twin = eq.Monitor(optimizer), ThinnedTwin(optimizer, 16)
    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0
    run(optimizer, twin, 320, scale=sign)
    assert_is_twins(monitor.reading(), twin)


@dataclass(frozen=True)
class Event:
    """What happens before one step."""

    edit: bool = False
    factor: float = 1.0
    momentum: float | None = None
    reset: bool = False
    checkpoint: bool = False
    without_gradient: frozenset[int] = field(default_factory=frozenset)


def rarely(strategy, otherwise):
    return st.integers(0, 7).flatmap(lambda k: strategy if k == 0 else st.just(otherwise))


events = st.builds(
    Event,
    edit=rarely(st.just(True), False),
    factor=rarely(st.sampled_from([0.5, 1.3, 0.98]), 1.0),
    momentum=rarely(st.sampled_from([0.0, 0.5, 0.9]), None),
    reset=rarely(rarely(st.just(True), False), False),
    checkpoint=rarely(st.just(True), False),
    without_gradient=rarely(st.frozensets(st.integers(0, 2)), frozenset()),
)


@given(
    st.lists(events, min_size=1, max_size=60),
    st.integers(1, 20),
    st.sampled_from([*SGD_FORMS, "AdamW"]),
    st.booleans(),
)
@settings(max_examples=150)
def test_whatever_happens_between_steps_the_reading_is_the_twins(script, every, form, names):
    torch.manual_seed(0)
    named = {f"p{i}": nn.Parameter(torch.randn(3, 2).double()) for i in range(3)}
    params = list(named.values())
    sgd = form in SGD_FORMS
    if sgd:
        optimizer = torch.optim.SGD(params, lr=0.1, **SGD_FORMS[form])
    else:
        optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    group = optimizer.param_groups[0]
    fixed_momentum = not sgd or group["nesterov"] or group["dampening"] != 0

    def watch():
        return eq.Monitor(optimizer, every=every, named_parameters=named if names else None)

    monitor, resumed, twin = watch(), watch(), ThinnedTwin(optimizer, every)
    if any(event.without_gradient for event in script):
        # Steps that do not move every tensor look like edits, until edits are looked for at every
        # step; the first difference costs an interval.
        for each in (monitor, resumed):
            each._watch.probes[0]._edits.every_step = True
    generator = torch.Generator().manual_seed(1)
    for t, event in enumerate(script):
        before = group.get("momentum", 0.0)
        if event.edit:
            with torch.no_grad():
                params[t % 3].mul_(1.5)
        group["lr"] *= event.factor
        if event.momentum is not None and not fixed_momentum:
            group["momentum"] = event.momentum
        if event.reset:
            for each in (monitor, resumed, twin):
                each.reset()
        if event.checkpoint:
            file = io.BytesIO()
            torch.save(resumed.state_dict(), file)
            file.seek(0)
            resumed.detach()
            resumed = watch()
            resumed.load_state_dict(torch.load(file))
        gradients(params, generator, -1.0 if group.get("maximize") else 1.0)
        if t or not fixed_momentum or not sgd:
            for i in event.without_gradient:
                params[i].grad = None
        changed = event.factor != 1 or group.get("momentum", 0.0) != before
        twin.before(edited=event.edit, changed=changed)
        optimizer.step()
        twin.after()
    reading = monitor.reading()
    assert reading == resumed.reading()
    if names:
        assert monitor.parameter_readings() == resumed.parameter_readings()
    count, difference, right = twin.read()
    size = max(right, abs(difference), 1e-9)
    assert reading.count == count
    assert reading.right == pytest.approx(right, rel=EXACT, abs=1e-12)
    if right == 0:  # no tensor had a gradient at the only step that was measured
        assert reading.undefined is not None
        return
    assert reading.difference == pytest.approx(difference, abs=EXACT * size)
    if right > 1e-9:
        assert_has_twins_error_bar(reading, twin, EXACT * size / right)


def test_a_group_added_in_mid_interval_begins_a_window_at_the_next_step():
    p, q = (nn.Parameter(torch.randn(4).double()) for _ in range(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    monitor = eq.Monitor(optimizer, every=16)
    run(optimizer, ThinnedTwin(optimizer, 16), 20)
    optimizer.add_param_group({"params": [q], "lr": 0.2})
    twin = ThinnedTwin(optimizer, 16)
    run(optimizer, twin, 20)
    assert_is_twins(monitor.reading(), twin)
    assert monitor.reading().step == 40


def test_a_checkpoint_after_the_scheduler_changed_the_learning_rate():
    """The usual order at the end of an epoch: scheduler.step(), then save."""

    def trained(checkpoint):
        torch.manual_seed(0)
        model = small_model().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = eq.Monitor(optimizer, every=16)
        run(optimizer, ThinnedTwin(optimizer, 16), 24)
        optimizer.param_groups[0]["lr"] = 0.01
        if checkpoint:
            state = monitor.state_dict()
            monitor.detach()
            monitor = eq.Monitor(optimizer, every=16)
            monitor.load_state_dict(state)
        run(optimizer, ThinnedTwin(optimizer, 16), 24, seed=2)
        return monitor.reading()

    assert trained(checkpoint=True) == trained(checkpoint=False)


@pytest.mark.parametrize("form", ["plain", "momentum"])
def test_a_checkpoint_with_a_learning_rate_tensor(form):
    def trained(checkpoint, change):
        torch.manual_seed(0)
        model, lr = small_model().double(), torch.tensor(0.1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, **SGD_FORMS[form])
        monitor = eq.Monitor(optimizer, every=16)
        run(optimizer, ThinnedTwin(optimizer, 16), 24)
        if change:
            lr.mul_(0.1)
        if checkpoint:
            state = monitor.state_dict()
            monitor.detach()
            monitor = eq.Monitor(optimizer, every=16)
            monitor.load_state_dict(state)
        run(optimizer, ThinnedTwin(optimizer, 16), 24, seed=2)
        return monitor.reading()

    for change in (False, True):
        assert trained(True, change) == trained(False, change)


@pytest.mark.parametrize("every", [1, 5])
def test_a_tensor_that_joins_late_with_dampening(every):
    """Its first step is undampened: the steps since the last measurement are not counted."""
    p, q = (nn.Parameter(torch.randn(4).double()) for _ in range(2))
    optimizer = torch.optim.SGD([p, q], lr=0.1, momentum=0.8, dampening=0.5)
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    generator = torch.Generator().manual_seed(1)
    for t in range(30):
        gradients([p, q] if t >= 22 else [p], generator)
        twin.before()
        optimizer.step()
        twin.after()
        if t == 22:  # an interval begins after this step
            twin.open = []
            if every == 1:
                twin.intervals.pop()
    assert_is_twins(monitor.reading(), twin)


def test_a_window_without_a_measured_step_uses_the_last_one_before_it():
    """A learning rate change ends an interval without a sample of the right side."""
    p = nn.Parameter(torch.randn(4).double())
    optimizer = torch.optim.SGD([p], lr=0.1)
    monitor, twin = eq.Monitor(optimizer, every=16), ThinnedTwin(optimizer, 16)
    generator = torch.Generator().manual_seed(1)
    for t in range(30):
        if t == 28:
            optimizer.param_groups[0]["lr"] = 0.01
        gradients([p], generator)
        twin.before(changed=t == 28)
        optimizer.step()
        twin.after()
    assert monitor.reading().undefined is None
    assert_is_twins(monitor.reading(), twin)


def counted_measurements(monitor):
    """Count the measurements of a monitor's only bucket."""
    ring, calls = monitor._watch.probes[0].ring, []
    note = ring.note
    ring.note = lambda entry: (calls.append(entry), note(entry))
    return calls


STEPS = 1000
SCHEDULES = {
    "one cycle": lambda o: OneCycleLR(o, 0.2, total_steps=STEPS + 1),
    "cosine": lambda o: CosineAnnealingLR(o, STEPS, eta_min=1e-3),
    "warm-up": lambda o: LinearLR(o, 1e-8, total_iters=STEPS),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("form", ["plain", "momentum", "nesterov", "AdamW"])
def test_a_learning_rate_that_changes_at_every_step(name, form):
    """Settings may drift by 1 % inside an interval, which moves the residual by 0.0025 at most.

    The price is an extra measurement for each per cent of change.
    """
    model = small_model().double()
    if form == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
    schedule = SCHEDULES[name](optimizer)
    monitor, exact = eq.Monitor(optimizer), eq.Monitor(optimizer, every=1)
    twin = ThinnedTwin(optimizer, 1)
    calls = counted_measurements(monitor)
    run(optimizer, twin, STEPS, on_step=lambda t: schedule.step())
    assert_is_twins(exact.reading(), twin)
    count, _, right = twin.read()
    measured = STEPS - (monitor._watch.probes[0]._open or 0)  # where the last interval ended
    window = twin.intervals[measured - monitor.reading().count : measured]
    difference = sum(row[1] for row in window) / len(window)
    scale = sum(abs(row[1]) for row in window) / len(window)
    assert abs(monitor.reading().count - count) <= 16
    assert abs(monitor.reading().difference - difference) <= 3e-4 * scale
    assert monitor.reading().difference == pytest.approx(difference, abs=0.0025 * right)
    assert len(calls) <= STEPS / 16 + 2 + {"one cycle": 600, "cosine": 400, "warm-up": 350}[name]
