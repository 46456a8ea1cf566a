"""A monitor's readings against naive float64 accumulation, for every form of optimizer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import NaiveSGDSides, half_running_mean
from torch import nn

import equilibrate as eq

STEPS = 45
RELATIVE = 1e-5

SGD_FORMS = {
    "plain": {},
    "decay": {"weight_decay": 0.05},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.8, "dampening": 0.4, "weight_decay": 0.02},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.02},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "maximize momentum": {"maximize": True, "momentum": 0.5, "weight_decay": 0.1},
    "maximize nesterov": {"maximize": True, "momentum": 0.5, "nesterov": True},
}
KERNELS = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def small_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, optimizer, naive=None, steps=STEPS, sign=1.0, on_step=None):
    """A plain loop on random data, with a naive accumulation around each step."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for t in range(steps):
        x = torch.randn(16, 6, generator=generator).to(dtype)
        y = torch.randint(3, (16,), generator=generator)
        optimizer.zero_grad()
        (sign * nn.functional.cross_entropy(model(x), y)).backward()
        if naive:
            naive.before()
        optimizer.step()
        if naive:
            naive.after()
        if on_step:
            on_step(t)


def assert_agrees(reading, lefts, rights, relative=RELATIVE):
    assert reading.left == pytest.approx(half_running_mean(lefts), rel=relative)
    assert reading.right == pytest.approx(half_running_mean(rights), rel=relative)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", SGD_FORMS)
def test_reading_equals_naive_accumulation_at_every_step(form, kernel):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form], **KERNELS[kernel])
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
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
    by_group = eq.Monitor(optimizer)
    by_name = eq.Monitor(optimizer, names=model.named_parameters())
    naive = NaiveSGDSides(optimizer)
    train(model, optimizer, naive)
    for monitor in (by_group, by_name):
        assert_agrees(monitor.reading(), naive.left, naive.right)
        assert monitor.reading().lr != monitor.reading().lr  # three rates: no one lr
    for name, p in model.named_parameters():
        assert_agrees(by_name.readings()[name], *naive.by_parameter[p])
    assert list(by_name.readings()) == [name for name, _ in model.named_parameters()]
    for monitor in (by_group, by_name):
        groups = monitor.group_readings()
        assert [reading.lr for reading in groups.values()] == [0.05, 0.2, 0.1]
        weight, bias = model[2].weight, model[2].bias
        assert_agrees(groups["group 1"], *naive.by_parameter[weight])
        assert_agrees(groups["group 2"], *naive.by_parameter[bias])
    assert by_group.readings().keys() == {"group 0", "group 1", "group 2"}


def test_frozen_parameters_and_parameters_without_gradient():
    model = small_model()
    model[0].bias.requires_grad_(False)
    unused = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), unused], lr=0.1, weight_decay=0.05)
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
    train(model, optimizer, naive)
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_a_parameter_that_has_a_gradient_only_now_and_then():
    model, extra = small_model(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1, weight_decay=0.05)
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
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
        monitor = eq.Monitor(optimizer)
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
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
    for _ in range(STEPS):
        a.grad = b.grad = torch.randn(4)
        naive.before()
        optimizer.step()
        naive.after()
    assert_agrees(monitor.reading(), naive.left, naive.right)


@pytest.mark.parametrize("form", [{}, {"momentum": 0.9}, {"momentum": 0.5, "dampening": 0.5}])
def test_sparse_gradients(form):
    embedding = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, **form)
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        embedding(torch.randint(20, (6,))).square().sum().backward()
        naive.before()
        optimizer.step()
        naive.after()
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_sparse_gradients_with_nesterov_are_refused():
    embedding = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    eq.Monitor(optimizer)
    embedding(torch.tensor([1, 2])).square().sum().backward()
    with pytest.raises(ValueError, match="sparse gradients with nesterov=True"):
        optimizer.step()


@pytest.mark.parametrize("form", SGD_FORMS)
def test_a_learning_rate_that_is_a_tensor_and_changes_within_the_window(form):
    model, lr = small_model(), torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **SGD_FORMS[form])
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0
    train(model, optimizer, naive, sign=sign, on_step=lambda t: lr.mul_(0.99))
    assert_agrees(monitor.reading(), naive.left, naive.right)
    assert monitor.reading().lr == pytest.approx(0.1 * 0.99 ** (STEPS - 1), rel=1e-5)


@pytest.mark.parametrize("form", SGD_FORMS)
def test_a_learning_rate_that_someone_else_changes(form):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=STEPS)
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0
    train(model, optimizer, naive, sign=sign, on_step=lambda t: warm_up.step())
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_momentum_switched_on_in_mid_training():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)

    def switch(t):
        if t == 30:
            optimizer.param_groups[0].update(momentum=0.9, dampening=0.3)

    train(model, optimizer, naive, on_step=switch)
    assert_agrees(monitor.reading(), naive.left, naive.right)


@pytest.mark.parametrize("edit", ["in place", "behind autograd's back"])
def test_parameters_edited_between_steps(edit):
    """An in-place edit is noticed at once; one through `.data` at the next measurement of |θ|²."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)

    def clamp(t):
        for p in model.parameters():
            with torch.no_grad():
                (p if edit == "in place" else p.data).mul_(0.999)

    train(model, optimizer, naive, on_step=clamp, steps=200)
    assert_agrees(
        monitor.reading(), naive.left, naive.right, RELATIVE if edit == "in place" else 0.05
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["decay", "dampening", "nesterov"])
def test_other_precisions(form, dtype):
    model = small_model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
    train(model, optimizer, naive)
    # In half precision the step itself is rounded, so θ + ηd is not quite θ.
    assert_agrees(
        monitor.reading(), naive.left, naive.right, 1e-10 if dtype.itemsize == 8 else 0.01
    )


def test_channels_last_weights():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 3))
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01, momentum=0.9)
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
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
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        naive.before()
        optimizer.step()
        naive.after()
    assert_agrees(monitor.reading(), naive.left, naive.right)


class SignDescent(torch.optim.Optimizer):
    """Somebody's own optimizer, whose groups have no learning rate called lr."""

    def __init__(self, params):
        super().__init__(params, {"size": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["size"] * p.grad.sign())


class HalvedSGD(torch.optim.SGD):
    """A subclass that does something else must not be taken for SGD."""

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] / 2 * p.grad)


OTHERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "HalvedSGD": lambda params: HalvedSGD(params, lr=0.1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_step_form_of_any_optimizer_equals_naive_accumulation(name):
    model = small_model()
    optimizer = OTHERS[name](model.parameters())
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
    if name == "HalvedSGD":
        naive.optimizer = type("Other", (), {"param_groups": optimizer.param_groups})()
    train(model, optimizer, naive)
    # Δ is read in single precision as a difference of parameters.
    assert_agrees(monitor.reading(), naive.left, naive.right, 1e-4)


def test_an_optimizer_without_a_learning_rate():
    model = small_model()
    optimizer = SignDescent(model.parameters())
    monitor = eq.Monitor(optimizer)
    train(model, optimizer)
    assert monitor.reading().right == pytest.approx(1e-4 * 83 / 2, rel=1e-3)
    assert monitor.reading().lr != monitor.reading().lr


def test_zero_learning_rate_reads_undefined_not_equilibrium():
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, steps=4)
    assert monitor.reading().undefined is not None
    assert "zero" in str(monitor.reading().undefined)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling_and_its_skipped_steps(fused):
    """A skipped step is not seen, or, skipped inside a fused kernel, counts nothing."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05, fused=fused)
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(12):
        loss = model(torch.randn(16, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        naive.before()
        optimizer.zero_grad()
        scaler.scale(loss * torch.inf if t == 8 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        naive.after()
    if fused:
        naive.left[8] = naive.right[8] = 0.0
    else:
        del naive.left[8], naive.right[8]
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_gradient_accumulation_reads_what_the_step_used():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.randn(16, 6)).square().mean().backward()
        naive.before()
        optimizer.step()
        naive.after()
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_clipping_in_a_hook_that_comes_later_is_seen():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    monitor, naive = eq.Monitor(optimizer), NaiveSGDSides(optimizer)

    def clip_and_note(*_):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        naive.before()

    optimizer.register_step_pre_hook(clip_and_note)
    train(model, optimizer, on_step=lambda t: naive.after())
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_a_group_added_later_starts_the_averages_again():
    model, extra = small_model(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer)
    train(model, optimizer, steps=10)
    optimizer.add_param_group({"params": [extra], "lr": 0.2})
    naive = NaiveSGDSides(optimizer)
    train(model, optimizer, naive, steps=7)
    assert (monitor.reading().step, monitor.reading().count) == (17, 4)
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_a_parameter_replaced_in_its_group_starts_the_averages_again():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
    monitor = eq.Monitor(optimizer)
    train(model, optimizer, steps=10)
    model[0].weight = nn.Parameter(2 * model[0].weight.detach())
    optimizer.param_groups[0]["params"][0] = model[0].weight
    naive = NaiveSGDSides(optimizer)
    train(model, optimizer, naive, steps=7)
    assert (monitor.reading().step, monitor.reading().count) == (17, 4)
    assert_agrees(monitor.reading(), naive.left, naive.right)


def test_parameters_added_later_are_checked_as_the_first_were():
    model, extra = small_model(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer, names=model.named_parameters())
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(ValueError, match=r"names lacks 1 .*\(group 1, parameter 0 of shape \(3,\)"):
        optimizer.step()
    monitor.detach()
    eq.Monitor(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    with pytest.raises(TypeError, match="parameter group 2 has complex parameters"):
        optimizer.step()


def test_reset_and_detach():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = eq.Monitor(optimizer)
    assert monitor.reading().undefined == "no step has been seen yet"
    train(model, optimizer, steps=10)
    monitor.reset()
    assert (monitor.reading().step, monitor.reading().count) == (10, 0)
    train(model, optimizer, steps=4)
    before = monitor.reading()
    monitor.detach()
    train(model, optimizer, steps=4)
    assert monitor.reading() == before
    assert (before.step, before.count) == (14, 2)


def test_non_finite_gradients_are_reported_and_leave_with_the_window():
    model = small_model()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    (p,) = optimizer.param_groups[0]["params"]
    monitor = eq.Monitor(optimizer)
    for t in range(8):
        p.grad = torch.full((2,), float("nan") if t == 2 else 1.0)
        before = p.detach().clone()
        optimizer.step()
        p.data.copy_(before)
        if t == 3:
            assert "non-finite" in str(monitor.reading().undefined)
            assert monitor.reading().residual != monitor.reading().residual
    assert monitor.reading().undefined is None
    del model


@pytest.mark.parametrize("form", SGD_FORMS)
@pytest.mark.parametrize("names", [False, True])
def test_stopped_and_resumed_readings_are_bit_identical(form, names, tmp_path):
    sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0

    def start():
        torch.manual_seed(0)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_FORMS[form])
        named = model.named_parameters() if names else None
        return model, optimizer, eq.Monitor(optimizer, names=named)

    model, optimizer, monitor = start()
    train(model, optimizer, steps=21, sign=sign)
    parts = {"model": model, "optimizer": optimizer, "monitor": monitor}
    torch.save({key: part.state_dict() for key, part in parts.items()}, tmp_path / "c.pt")
    train(model, optimizer, steps=30, sign=sign)
    expected = monitor.reading(), monitor.readings()

    model, optimizer, monitor = start()
    loaded = torch.load(tmp_path / "c.pt")
    monitor.load_state_dict(loaded["monitor"])  # in whatever order
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, steps=30, sign=sign)
    assert (monitor.reading(), monitor.readings()) == expected


def test_the_state_of_another_model_is_refused():
    def monitor_of(model, **kwargs):
        return eq.Monitor(torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)

    state = monitor_of(small_model()).state_dict()
    with pytest.raises(ValueError, match=r"another model or optimizer.*4 tensors of 83 parameters"):
        monitor_of(nn.Linear(2, 2)).load_state_dict(state)
    other = small_model()
    with pytest.raises(ValueError, match=r"without names, here is .* with names"):
        monitor_of(other, names=other.named_parameters()).load_state_dict(state)
    with pytest.raises(ValueError, match="state is not that of a Monitor: it holds step, monitor"):
        monitor_of(other).load_state_dict({"step": 1, "monitor": state})


def test_wrong_arguments_are_named():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Sequential"
    ):
        eq.Monitor(model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"names lacks 4 parameter\(s\)"):
        eq.Monitor(optimizer, names=nn.Linear(2, 2).named_parameters())
    for names in (model, ["0.weight"], True):
        with pytest.raises(TypeError, match=r"names must be pairs .* model.named_parameters\(\)"):
            eq.Monitor(optimizer, names=names)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"lr of parameter group 0 must be positive, got 0.0"):
        eq.Monitor(torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(ValueError, match="dampening of parameter group 0 must be below 1"):
        eq.Monitor(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=1))
    with pytest.raises(TypeError, match="parameter group 0 has complex parameters"):
        eq.Monitor(torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1))
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match="optimizer has no parameters"):
        eq.Monitor(optimizer)
    forgetful = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=10)
    eq.Monitor(forgetful)
    with pytest.raises(ValueError, match="lr × weight_decay is 1"):
        train(model, forgetful, steps=1)


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
        monitor = eq.Monitor(optimizer)
        sign = -1.0 if SGD_FORMS[form].get("maximize") else 1.0
        train(model, optimizer, steps=9, sign=sign)
        readings.append(monitor.reading())
    one, other = readings
    assert one.left == pytest.approx(other.left, rel=1e-9)
    assert one.right == pytest.approx(other.right, rel=1e-9)
    assert one.lr == other.lr
