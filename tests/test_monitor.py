"""A monitor's readings of SGD against naive float64 accumulation, for every form of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.monitored import RELATIVE, SGD_FORMS, STEPS, assert_agrees, small_model, train
from support.naive import NaiveSGDSides
from torch import nn

import equilibrate as eq

KERNELS = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", SGD_FORMS)
def test_reading_equals_naive_accumulation_at_every_step(form, kernel):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form], **KERNELS[kernel])
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0
    train(
        model,
        optimizer,
        naive,
        sign=sign,
        on_step=lambda t: assert_agrees(monitor.reading(), naive.left, naive.right),
    )
    reading = monitor.reading()
    assert (reading.step, reading.count, reading.lr) == (STEPS, STEPS - STEPS // 2, 0.1)
    assert reading.residual == pytest.approx(reading.left / reading.right - 1)


def test_groups_with_their_own_settings_and_each_parameter():
    model = small_model()
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.05, "momentum": 0.9, "weight_decay": 0.02},
            {"params": [model[2].weight], "lr": 0.2, "weight_decay": 0.1},
            {"params": [model[2].bias], "lr": 0.1, "momentum": 0.5, "dampening": 0.2},
        ],
        lr=0.1,
    )
    by_group = eq.Monitor(optimizer, every=1)
    by_name = eq.Monitor(optimizer, every=1, named_parameters=model.named_parameters())
    naive = NaiveSGDSides(optimizer)
    train(model, optimizer, naive)
    for monitor in (by_group, by_name):
        assert_agrees(monitor.reading(), naive.left, naive.right)
        assert monitor.reading().lr != monitor.reading().lr  # three rates: no one lr
    for name, p in model.named_parameters():
        assert_agrees(by_name.parameter_readings()[name], *naive.by_parameter[p])
    assert list(by_name.parameter_readings()) == [name for name, _ in model.named_parameters()]
    for monitor in (by_group, by_name):
        groups = monitor.group_readings()
        assert [reading.lr for reading in groups.values()] == [0.05, 0.2, 0.1]
        weight, bias = model[2].weight, model[2].bias
        assert_agrees(groups["group 1"], *naive.by_parameter[weight])
        assert_agrees(groups["group 2"], *naive.by_parameter[bias])
    assert by_group.group_readings().keys() == {"group 0", "group 1", "group 2"}


def test_frozen_parameters_and_parameters_without_gradient():
    model = small_model()
    model[0].bias.requires_grad_(False)
    unused = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), unused], lr=0.1, weight_decay=0.05)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    train(model, optimizer, naive)
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_a_parameter_that_has_a_gradient_only_now_and_then():
    model, extra = small_model(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1, weight_decay=0.05)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    for t in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 6)).square().mean()
        (loss + (extra.sum() ** 2 if t % 3 == 0 else 0)).backward()
        naive.before()
        optimizer.step()
        naive.after()
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_closures_are_seen_through():
    runs = []
    for closure in (False, True):
        torch.manual_seed(0)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        monitor = eq.Monitor(optimizer, every=1)
        for _ in range(STEPS):
            x = torch.randn(16, 6)

            def evaluate(x=x, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            if closure:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
        runs.append(monitor.reading())
    assert runs[0] == runs[1]


def test_gradients_that_are_shared_between_parameters():
    a, b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
    optimizer = torch.optim.SGD([a, b], lr=0.1, weight_decay=0.1, momentum=0.5)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    for _ in range(STEPS):
        a.grad = b.grad = torch.randn(4)
        naive.before()
        optimizer.step()
        naive.after()
    assert_agrees(monitor.reading(), naive.left, naive.right)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.5, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
    ],
)
def test_sparse_gradients(form):
    embedding = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, **form)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        embedding(torch.randint(20, (6,))).square().sum().backward()
        naive.before()
        optimizer.step()
        naive.after()
    assert_agrees(monitor.reading(), naive.left, naive.right)


@pytest.mark.parametrize("form", SGD_FORMS)
def test_a_learning_rate_that_is_a_tensor_and_changes_within_the_window(form):
    model, lr = small_model(), torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **SGD_FORMS[form])
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0
    train(model, optimizer, naive, sign=sign, on_step=lambda t: lr.mul_(0.99))
    assert_agrees(monitor.reading(), naive.left, naive.right)
    assert monitor.reading().lr == pytest.approx(0.1 * 0.99 ** (STEPS - 1), rel=1e-5)


@pytest.mark.parametrize("form", SGD_FORMS)
def test_a_learning_rate_that_someone_else_changes(form):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=STEPS)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0
    train(model, optimizer, naive, sign=sign, on_step=lambda t: warm_up.step())
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_momentum_switched_on_in_mid_training():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)

    def switch(t):
        if t == 30:
            optimizer.param_groups[0].update(momentum=0.9, dampening=0.3)

    train(model, optimizer, naive, on_step=switch)
    assert_agrees(monitor.reading(), naive.left, naive.right)


@pytest.mark.parametrize("form", SGD_FORMS)
def test_parameters_edited_between_steps(form):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)

    def shrink(t):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.999)

    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0
    train(model, optimizer, naive, on_step=shrink, sign=sign)
    assert_agrees(monitor.reading(), naive.left, naive.right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["decay", "dampening", "nesterov"])
def test_other_precisions(form, dtype):
    model = small_model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    train(model, optimizer, naive)
    relative = 1e-10 if dtype is torch.float64 else RELATIVE
    assert_agrees(monitor.reading(), naive.left, naive.right, relative)


def test_channels_last_weights():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 3))
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01, momentum=0.9)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6)).square().mean().backward()
        naive.before()
        optimizer.step()
        naive.after()
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_large_tensors_lose_no_digits():
    p = nn.Parameter(torch.randn(1_500_000))
    optimizer = torch.optim.SGD([p], lr=0.1, weight_decay=0.1)
    monitor, naive = eq.Monitor(optimizer, every=1), NaiveSGDSides(optimizer)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        naive.before()
        optimizer.step()
        naive.after()
    assert_agrees(monitor.reading(), naive.left, naive.right)


@given(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.sampled_from(list(SGD_FORMS)))
@settings(max_examples=20)
def test_how_parameters_are_grouped_does_not_matter(groups, form):
    readings = []
    for assignment in (groups, [0, 0, 0, 0]):
        torch.manual_seed(0)
        model = small_model()
        params = list(model.parameters())
        parts = [[p for p, k in zip(params, assignment, strict=True) if k == g] for g in range(3)]
        optimizer = torch.optim.SGD(
            [{"params": part} for part in parts if part], lr=0.1, **SGD_FORMS[form]
        )
        monitor = eq.Monitor(optimizer, every=1)
        sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0
        train(model, optimizer, steps=9, sign=sign)
        readings.append(monitor.reading())
    one, other = readings
    assert one.left == pytest.approx(other.left, rel=1e-9)
    assert one.right == pytest.approx(other.right, rel=1e-9)
    assert one.lr == other.lr
