"""Training loops that do unusual things around a monitor: hooks, wrappers, errors, compilation."""

import copy
import gc
import weakref

import pytest
import torch
from support.monitored import SGD_FORMS, small_model, train
from support.naive import NaiveSGDSides, ThinnedTwin, half_running_mean
from torch import nn
from torch.optim.swa_utils import AveragedModel

import equilibrate as eq


def noisy_gradients(params):
    for p in params:
        p.grad = 0.3 * (p.detach() - 1) + torch.randn_like(p)


def assert_is_twins(reading, twin, relative=1e-5):
    count, difference, right = twin.read()
    assert reading.count == count
    assert reading.right == pytest.approx(right, rel=relative)
    assert reading.difference == pytest.approx(difference, abs=relative * right)


def loop(optimizer, twin, steps, **events):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        noisy_gradients(params)
        twin.before(**events)
        optimizer.step()
        twin.after()


# Other hooks ----------------------------------------------------------------------------------


class NotingTwin(ThinnedTwin):
    """A twin that reads the parameters before other hooks after the step edit them."""

    def after(self, *_):
        super().after()


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("form", SGD_FORMS)
@pytest.mark.parametrize("act", ["clear gradients", "clamp weights"])
def test_a_hook_registered_earlier_does_not_spoil_the_reading(act, form, every):
    params = [nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1, **SGD_FORMS[form])
    twin = NotingTwin(optimizer, every)

    @torch.no_grad()
    def hook(*_):
        if act == "clear gradients":
            optimizer.zero_grad(set_to_none=True)
        else:
            for p in params:
                p.clamp_(-0.5, 0.5)

    optimizer.register_step_post_hook(lambda *_: twin.after())
    optimizer.register_step_post_hook(hook)
    monitor = eq.Monitor(optimizer, every=every)
    for t in range(40):
        noisy_gradients(params)
        twin.before(edited=act == "clamp weights" and t > 0)
        optimizer.step()
    assert_is_twins(monitor.reading(), twin)


@pytest.mark.parametrize("every", [1, 4])
def test_edits_through_data_are_reported(every):
    """They leave no trace that could be noticed without reading the parameters."""
    params = [nn.Parameter(torch.randn(6)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    monitor = eq.Monitor(optimizer, every=every)
    for _ in range(40):
        noisy_gradients(params)
        optimizer.step()
        for p in params:
            p.data.clamp_(-0.1, 0.1)
    with pytest.warns(UserWarning, match=r"changed between two optimizer steps .* torch.no_grad"):
        monitor.reading()


@pytest.mark.parametrize("every", [1, 4])
def test_parameters_that_are_given_new_memory(every):
    params = [nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    loop(optimizer, twin, 10)
    vector = torch.full((12,), 2.0, dtype=torch.float64)
    nn.utils.vector_to_parameters(vector, params)
    noisy_gradients(params)
    twin.before()
    optimizer.step()
    twin.after()
    if every > 1:  # noticed at the next measured step
        noisy_gradients(params)
        twin.before(edited=True)
        optimizer.step()
        twin.after()
    loop(optimizer, twin, 21)
    assert_is_twins(monitor.reading(), twin)


# Settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dampening_of_one(momentum, every):
    """Without momentum it has no effect; with momentum no gradient reaches the velocity."""
    p = nn.Parameter(torch.randn(6, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=momentum, dampening=1)
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    loop(optimizer, twin, 24)
    assert_is_twins(monitor.reading(), twin)


@pytest.mark.parametrize("every", [1, 16])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shrink", [0.0, 1e-10, -1e-10, 1e-3, 2e-3, 0.09, 0.11, -0.11])
def test_a_step_that_forgets_the_parameters(shrink, nesterov, every):
    p = nn.Parameter(torch.randn(50))
    form = {"momentum": 0.5, "nesterov": True} if nesterov else {}
    optimizer = torch.optim.SGD([p], lr=0.1, weight_decay=(1 - shrink) / 0.1, **form)
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    loop(optimizer, twin, 64)
    assert_is_twins(monitor.reading(), twin)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_group_with_learning_rate_zero_that_is_raised_later(kind, momentum, every):
    a, b = (nn.Parameter(torch.randn(4, dtype=torch.float64)) for _ in range(2))
    form = {"momentum": momentum} if kind is torch.optim.SGD else {}
    optimizer = kind([{"params": [a]}, {"params": [b], "lr": 0.0}], lr=0.05, **form)
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    loop(optimizer, twin, 16)
    reading = monitor.group_readings()["group 1"]
    assert (reading.left, reading.right) == (0.0, 0.0)
    assert_is_twins(monitor.reading(), twin)
    optimizer.param_groups[1]["lr"] = 0.05
    loop(optimizer, twin, 32)
    assert_is_twins(monitor.reading(), twin)
    assert monitor.group_readings()["group 1"].right > 0


class OddKeys(torch.optim.Optimizer):
    """Its keys are called as SGD's are and mean something else."""

    def __init__(self, params, lr: float | None = 0.1):
        defaults = {
            "lr": lr,
            "momentum": torch.tensor([0.9, 0.8]),
            "betas": (0.9, 0.99),
            "dampening": "none",
            "nesterov": None,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["momentum"] = group["momentum"] * 0.99
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1 if group["lr"] is None else group["lr"])


class StepForm:
    """What the twin sees of an optimizer that is not SGD, whatever its keys mean."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return [
            {"params": g["params"], "lr": 1.0 if g.get("lr") is None else g["lr"]}
            for g in self.optimizer.param_groups
        ]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    "make",
    [OddKeys, lambda p: OddKeys(p, None), lambda p: torch.optim.ASGD(p, lr=0.1, t0=5)],
    ids=["odd keys", "no learning rate", "ASGD"],
)
def test_optimizers_whose_keys_mean_something_else(make, every):
    p = nn.Parameter(torch.randn(6, dtype=torch.float64))
    optimizer = make([p])
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    twin.naive.optimizer = StepForm(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    loop(optimizer, twin, 24)
    assert_is_twins(monitor.reading(), twin)


# Wrappers and several monitors ------------------------------------------------------------------


class WrappedOptimizer(torch.optim.Optimizer):
    """As in accelerate: an optimizer by its class, that only holds another one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups):  # pyright: ignore[reportIncompatibleVariableOverride]
        self.optimizer.param_groups = groups

    @property
    def state(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.state

    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def test_a_wrapped_optimizer():
    model = small_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = WrappedOptimizer(optimizer)
    monitor, twin = eq.Monitor(wrapped, every=4), ThinnedTwin(optimizer, 4)
    scheduler = eq.FDRScheduler(wrapped, min_steps=1, every=1, threshold=1e9, factor=0.5)
    params = list(model.parameters())
    for _ in range(16):
        noisy_gradients(params)
        twin.before()
        wrapped.step()
        twin.after()
    assert monitor.optimizer is optimizer
    assert_is_twins(monitor.reading(), twin)
    scheduler.step()
    assert scheduler.last_decision.lowered
    assert wrapped.param_groups[0]["lr"] == 0.05


def hooks_of(optimizer):
    return (
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
    )


@pytest.mark.parametrize("make", [eq.Monitor, eq.FDRScheduler])
def test_a_notebook_cell_that_is_run_again_frees_the_old_object(make):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    current = make(optimizer)
    counted = hooks_of(optimizer)
    for _ in range(3):
        old = weakref.ref(current)
        current = make(optimizer)
        train(model, optimizer, steps=3)
        gc.collect()
        assert old() is None
        assert hooks_of(optimizer) == counted
    watching = current if make is eq.Monitor else current.monitor
    assert watching.step == 3


def test_two_monitors_on_one_optimizer_do_not_notice_each_other():
    params = [nn.Parameter(torch.randn(6, dtype=torch.float64))]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    monitors = [eq.Monitor(optimizer, every=every) for every in (1, 5, 5)]
    twins = [ThinnedTwin(optimizer, every) for every in (1, 5)]
    for _ in range(33):
        noisy_gradients(params)
        for twin in twins:
            twin.before()
        optimizer.step()
        for twin in twins:
            twin.after()
    assert_is_twins(monitors[0].reading(), twins[0])
    assert_is_twins(monitors[1].reading(), twins[1])
    assert monitors[1].reading() == monitors[2].reading()


@pytest.mark.parametrize("shared", [False, True])
def test_two_optimizers_on_one_model(shared):
    """Steps of the other optimizer on the same parameters are edits for this one."""
    one, two = (nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(2))
    first = torch.optim.SGD([one], lr=0.1)
    second = torch.optim.SGD([one, two] if shared else [two], lr=0.05, momentum=0.9)
    pairs = [(o, eq.Monitor(o, every=4), ThinnedTwin(o, 4)) for o in (first, second)]
    for _ in range(32):
        for optimizer, _, twin in pairs:
            noisy_gradients([one, two])
            twin.before(edited=shared)
            optimizer.step()
            twin.after()
    for _, monitor, twin in pairs:
        assert_is_twins(monitor.reading(), twin)


def test_an_average_of_the_weights_is_no_edit():
    model = small_model().double()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, twin = eq.Monitor(optimizer, every=4), ThinnedTwin(optimizer, 4)
    for _ in range(12):
        loop(optimizer, twin, 1)
        average.update_parameters(model)
        copy.deepcopy(model.state_dict())
    assert_is_twins(monitor.reading(), twin)
    assert monitor.reading().count == 8


def test_a_scheduler_stepped_at_every_batch_waits_for_a_long_window():
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scheduler = eq.FDRScheduler(optimizer, threshold=1e9)
    rates = []
    for _ in range(250):
        noisy_gradients([p])
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    lowered = next(t for t, lr in enumerate(rates, start=1) if lr < 0.1)
    assert lowered >= 200
    assert scheduler.last_decision.reason.startswith("too few steps")


# Steps that hooks do not see --------------------------------------------------------------------

# Dynamo imports deprecated parts of torch when it is first used.
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def compiled_run(backend, every, form, measure=True, steps=24, watch=True):
    """Train with a compiled step, with or without a monitor."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1, **form)
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    if not watch:
        monitor.detach()
    step = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
    for _ in range(steps):
        noisy_gradients(params)
        twin.before()
        if watch and measure:
            with monitor.measure():
                step()
        else:
            step()
        twin.after()
    return monitor, twin


def dynamo_counts():
    """Return how many graphs the last run has compiled, and how often tracing broke off."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@compiles
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("form", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_measure_reads_a_compiled_step(form, every):
    monitor, twin = compiled_run("eager", every, form)
    assert monitor.step == 24
    assert_is_twins(monitor.reading(), twin)
    watched = dynamo_counts()
    compiled_run("eager", every, form, watch=False)
    assert watched == dynamo_counts()


@compiles
def test_hooks_do_nothing_inside_a_compiled_step_and_the_reading_says_so():
    monitor, _ = compiled_run("eager", 1, {}, measure=False)
    assert monitor.step == 0
    with pytest.warns(UserWarning, match=r"no optimizer step was seen.*monitor.measure\(\)"):
        assert monitor.reading().undefined == "no step has been seen yet"


@compiles
def test_a_scheduler_says_that_it_sees_no_steps():
    torch._dynamo.reset()
    p = nn.Parameter(torch.randn(6))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scheduler = eq.FDRScheduler(optimizer, threshold=1e9, min_steps=1)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        noisy_gradients([p])
        step()
    scheduler.step()
    assert scheduler.last_decision.reason.startswith("no optimizer step was seen")
    assert "monitor.measure()" in scheduler.last_decision.reason
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_steps_in_a_measure_block_are_counted_once():
    monitor, twin = compiled_run(None, 4, {"momentum": 0.9})
    assert monitor.step == 24
    assert_is_twins(monitor.reading(), twin)


# Errors ---------------------------------------------------------------------------------------


def fail():
    raise InterruptedError


@pytest.mark.parametrize("at", [0, 5, 7, 8])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("make", [*SGD_FORMS, "Adam"])
def test_training_continues_after_a_closure_has_raised(make, every, at):
    params = [nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(2)]
    if make == "Adam":
        optimizer = torch.optim.Adam(params, lr=0.01)
    else:
        optimizer = torch.optim.SGD(params, lr=0.1, **SGD_FORMS[make])
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    loop(optimizer, twin, at)
    with pytest.raises(InterruptedError):
        optimizer.step(fail)
    loop(optimizer, twin, 24 - at)
    assert monitor.step == 24
    assert_is_twins(monitor.reading(), twin)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("every", [1, 4])
def test_an_error_inside_measure(every, moved):
    params = [nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    monitor, twin = eq.Monitor(optimizer, every=every), ThinnedTwin(optimizer, every)
    loop(optimizer, twin, 7)

    @torch.no_grad()
    def break_off():
        if moved:
            params[0].mul_(0.5)
        raise InterruptedError

    with pytest.raises(InterruptedError), monitor.measure():
        break_off()
    loop(optimizer, twin, 1, edited=moved)
    loop(optimizer, twin, 16)
    assert monitor.step == 24
    assert_is_twins(monitor.reading(), twin)


# Blocks of measurements -----------------------------------------------------------------------


def readings_of(form, asked, every):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **form)
    named = eq.Monitor(optimizer, every=every, named_parameters=model.named_parameters())
    total = eq.Monitor(optimizer, every=every)
    for t in range(3 * 64 * every + 5):
        noisy_gradients(model.parameters())
        optimizer.step()
        if asked(t):
            named.reading()
            total.reading()
    return named.parameter_readings(), total.reading()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("form", ["decay", "dampening", "nesterov"])
def test_asking_for_a_reading_changes_no_bit_of_a_later_one(form, every):
    never = readings_of(SGD_FORMS[form], lambda t: False, every)
    assert readings_of(SGD_FORMS[form], lambda t: t % 7 == 3, every) == never


def test_steps_without_any_gradient_count_zero():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    monitor = eq.Monitor(optimizer, every=1)
    for gradient in (torch.ones(2), None, torch.ones(2), None):
        p.grad = gradient
        optimizer.step()
    # The window is the last two steps: θ·g = 1 at the third (θ = ½), nothing at the fourth.
    assert monitor.reading() == eq.Reading(step=4, count=2, left=0.5, right=0.25, lr=0.5)


def test_a_learning_rate_tensor_that_is_changed_after_the_step():
    p, lr = nn.Parameter(torch.ones(2)), torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.SGD([p], lr=lr)
    monitor = eq.Monitor(optimizer, every=1)
    p.grad = torch.ones(2)
    optimizer.step()
    lr.zero_()
    assert (monitor.reading().left, monitor.reading().right) == (2.0, 0.5)


def test_a_buffer_that_is_cleared_before_a_reset():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.5)
    monitor = eq.Monitor(optimizer, every=1)
    for _ in range(5):
        noisy_gradients([p])
        optimizer.step()
    optimizer.state[p]["momentum_buffer"].zero_()
    monitor.reset()
    naive = NaiveSGDSides(optimizer)
    noisy_gradients([p])
    naive.before()
    optimizer.step()
    naive.after()
    assert monitor.reading().left == pytest.approx(half_running_mean(naive.left), rel=1e-5)


@pytest.mark.parametrize("how", ["clear", "new entry"])
def test_buffers_are_found_again_after_the_state_was_cleared(how):
    p = nn.Parameter(torch.randn(6, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    monitor = eq.Monitor(optimizer, every=4)
    loop(optimizer, ThinnedTwin(optimizer, 4), 9)
    if how == "clear":
        optimizer.state.clear()
    else:
        optimizer.state[p] = {}
    monitor.reset()
    twin = ThinnedTwin(optimizer, 4)
    loop(optimizer, twin, 12)
    assert_is_twins(monitor.reading(), twin)


def test_a_non_finite_gradient_spoils_one_step_only():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    monitor = eq.Monitor(optimizer, every=1)
    for t in range(4):
        p.grad = torch.full((2,), float("nan") if t == 1 else 1.0)
        before = p.detach().clone()
        optimizer.step()
        p.data.copy_(before)
    assert monitor.reading().count == 2
    assert monitor.reading().undefined is None


def test_the_default_device_may_be_another_one_than_that_of_the_model():
    """With `torch.set_default_device("cuda")` numbers that stay on the host must not go there."""
    torch.manual_seed(0)
    theta = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([theta], lr=0.1, momentum=0.9)
    names = {"theta": theta}
    with torch.device("meta"):  # nothing can be read from there
        monitor = eq.Monitor(optimizer, named_parameters=names, every=2, trace=True)
        stationary = eq.FDRScheduler(optimizer, monitor=monitor, rule=eq.rules.Stationary())
        forecaster = eq.Forecaster(optimizer, horizons=[8], every=2)
        gain = eq.FDRScheduler(optimizer, rule=eq.rules.Gain(), forecaster=forecaster)
        for _ in range(300):
            theta.grad = theta.detach() + torch.randn_like(theta)
            optimizer.step()
            gain.step(theta.detach().square().sum())
            stationary.step()
        for scheduler in (gain, stationary):
            assert scheduler.judgements
            scheduler.load_state_dict(scheduler.state_dict())
        with forecaster.averaged():
            assert monitor.parameter_rotations()["theta"].samples
    assert forecaster.forecasts()[0].undefined is None
    assert monitor.reading().count == 150
