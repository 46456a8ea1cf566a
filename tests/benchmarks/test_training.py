"""The training study: schedules are exact, statistics right, runs resumable, tables made."""

import json
import math
import os
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from equilibrate.rules import Verdict

import equilibrate as eq


@pytest.fixture
def study(load, monkeypatch):
    """Import a module of the study."""
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):  # set for processes, restored afterwards
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # equal runs, everywhere
    return lambda name: load(f"training_study.{name}")


def job(study, arm="constant", task="mlp", **changes):
    """A small run."""
    arms, tasks, controls = study("arms"), study("tasks"), study("controls")
    setting = arms.ARMS[arm].trials(tasks.TASKS[task])[0]
    cadence = controls.Cadence(check=5, every=1, horizons=(4, 6))
    settings = {"seed": 0, "setting": setting, "budget": 30, "steps": 60, "interval": 10}
    settings |= {"cadence": cadence} | changes
    return study("runs").Job("final", task, arm, **settings)


def place(study, out=None, **changes):
    """Where and how small runs are made."""
    from pathlib import Path

    settings = {"device": "cpu", "tiny": True} | changes
    return study("runs").Place(out or Path("nowhere"), **settings)


def made(study, small):
    """Make a run and return its record."""
    training = study("runs").Training(small, place(study))
    control = training.control(small)
    training.run(control, small.steps)
    return training.record(small, control)


def loop_of(study, task, optimizer=None, device="cpu"):
    """A loop with a tiny model."""
    tasks, data = study("tasks"), study("data")
    chosen = tasks.TASKS[task]
    network = tasks.Network(chosen, data.load(chosen.data, None), device, tiny=True)
    return tasks.Loop(network, 0, optimizer or partial(torch.optim.SGD, lr=0.1))


def parameter_and_sgd(lr=1.0):
    theta = torch.nn.Parameter(torch.ones(3))
    return theta, torch.optim.SGD([theta], lr=lr)


# Tasks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["mlp", "cnn", "resnet", "transformer"])
def test_each_task_learns_and_depends_on_the_seed_alone(study, task):
    run = partial(made, study)
    small = job(study, task=task, interval=12, steps=36)
    first, again = (run(small) for _ in "ab")
    other = run(replace(small, seed=1, steps=12))
    assert first["curve"] == again["curve"]
    assert first["curve"][0] != other["curve"][0]
    losses = [row[3] for row in first["curve"]]
    assert losses[-1] < losses[0]
    assert [row[0] for row in first["curve"]] == [12, 24, 36]
    assert not first["diverged"]


def test_crops_and_mirror_images_are_windows_of_the_image(study):
    network = loop_of(study, "resnet").network
    examples = study("data").load("cifar10", None)
    network.shuffle(0, 0)
    chosen = network._order[:8]
    inputs, labels = network._batch(torch.arange(8))
    assert torch.equal(labels, examples.train.labels[chosen])
    padded = torch.nn.functional.pad(
        examples.train.inputs[chosen], (4, 4, 4, 4), value=round(examples.mean)
    )
    padded = (padded.float() - examples.mean) / examples.scale
    places = []
    for image, whole in zip(inputs, padded, strict=True):
        found = [
            (down, right, mirrored)
            for down in range(9)
            for right in range(9)
            for mirrored in (False, True)
            if torch.equal(
                image.flip(-1) if mirrored else image,
                whole[:, down : down + 32, right : right + 32],
            )
        ]
        places += found
        assert len(found) == 1
    assert len(set(places)) > 4


def test_an_epoch_sees_each_example_at_most_once(study):
    loop = loop_of(study, "mlp")
    network, size = loop.network, loop.network.batch_size
    epochs = []
    for _ in range(2):
        seen = []
        for _ in range(network.epoch):
            loop.train()
            seen += network._order[size * (network._place - 1) :][:size].tolist()
        assert len(seen) == len(set(seen)) == network.epoch * size
        epochs.append(seen)
    assert epochs[0] != epochs[1]


@pytest.fixture
def study_on_gpu(load):
    """Import a module of the study, with the precision of products restored afterwards."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    yield lambda name: load(f"training_study.{name}")
    products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("task", ["mlp", "cnn", "resnet", "transformer"])
def test_steps_of_a_graph_are_those_without_one(study_on_gpu, task):
    study = study_on_gpu
    chosen = study("tasks").TASKS[task]
    study("runs").prepare("cuda")
    optimizer = partial(chosen.optimizer, lr=chosen.rates[0], fused=True, **chosen.settings)
    found = []
    for graphed in (True, False):
        loop = loop_of(study, task, optimizer, "cuda")
        if not graphed:
            loop.network._graph = None
        for _ in range(2 * loop.network.epoch if task == "mlp" else 20):
            loop.train()
        model = loop.network.model
        found.append([loop.network.total, *model.parameters(), *model.buffers()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_validation_and_test_examples_are_not_trained_on(study):
    data = study("data")
    for name in ("mnist", "cifar10", "text"):
        found = data.load(name, None)
        parts = [part.inputs for part in (found.train, found.validation, found.test)]
        assert all(len(part) for part in parts)
        packed = data._random(name)
        total = sum(len(packed[k]) for k in packed if "labels" not in k)
        assert sum(map(len, parts)) == total


def test_packed_text_and_images_are_read_back(load, study, tmp_path):
    import io
    import lzma

    pack_data, data = load("pack_data"), study("data")
    arrays = data._random("mnist") | data._random("cifar10") | data._random("text")
    packed = {k: pack_data.pack(v) if k.endswith("images") else v for k, v in arrays.items()}
    buffer = io.BytesIO()
    np.savez(buffer, **packed)
    (tmp_path / "data.xz").write_bytes(lzma.compress(buffer.getvalue(), preset=0))
    for name in ("mnist", "cifar10", "text"):
        found = data.load(name, tmp_path / "data.xz")
        assert found.fingerprint == data.load(name, None).fingerprint
    assert (tmp_path / "data.npz").exists()


# Arms ----------------------------------------------------------------------------------------


def test_cosine_and_step_are_those_of_torch(study):
    controls = study("controls")
    budget = 40
    for plan, scheduler in (
        (
            controls.cosine_plan(budget),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, budget),
        ),
        (
            controls.step_plan(budget, (0.5, 0.75), 0.1),
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [20, 30], 0.1),
        ),
    ):
        _, optimizer = parameter_and_sgd()
        theirs = scheduler(optimizer)
        control = controls.Planned(optimizer, plan, budget)
        for step in range(budget):
            assert control.factor(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
            last = control.factor(step)
            optimizer.step()
            theirs.step()
        assert control.factor(budget) == control.factor(10 * budget) == last > 0


def test_stable_then_decay(study):
    plan = study("controls").cooldown_plan(100, 0.2)
    assert [plan(step) for step in (0, 79, 80)] == [1, 1, 1]
    assert plan(90) == pytest.approx(0.5)
    assert plan(99) == pytest.approx(0.05)


@pytest.mark.parametrize(("budgets", "reached"), [(0.5, 15), (1.0, 30), (2.0, 60)])
def test_cosines_are_made_for_their_budgets(study, budgets, reached):
    arm = {0.5: "cosine-half", 1.0: "cosine", 2.0: "cosine-double"}[budgets]
    arms, controls = study("arms"), study("controls")
    _, optimizer = parameter_and_sgd()
    control = arms.ARMS[arm].make(arms.Context(optimizer, 30, 60, {}, controls.DEFAULT))
    rates = [control.factor(step) for step in range(60)]
    assert rates[reached // 2] == pytest.approx(0.5, abs=0.06)
    assert rates[reached - 1] < 0.02
    assert set(rates[reached:]) <= {rates[reached - 1]}


def test_every_arm_runs_and_has_equal_numbers_of_trials(study, load):
    arms, tasks = study("arms"), study("tasks")
    run = partial(made, study)
    names, missing = arms.available()
    assert set(names) | set(missing) == set(arms.ARMS)
    for name in names:
        for task in tasks.TASKS.values():
            trials = arms.ARMS[name].trials(task)
            assert len({json.dumps(trial) for trial in trials}) == arms.TRIALS
        record = run(job(study, arm=name, steps=40))
        assert len(record["curve"]) == 4


def test_what_arms_do_to_the_learning_rate_is_recorded(study):
    run = partial(made, study)
    setting = {"lr": 0.1, "drop": 0.5, "patience": 0}
    record = run(job(study, "plateau", setting=setting, steps=60))
    lowered = len(record["acted"])
    assert lowered > 0
    late = [step for step, _ in record["acted"] if step < 60]
    assert record["curve"][-1][4] == pytest.approx(0.1 * 0.5 ** len(late))
    record = run(job(study, "cosine", setting={"lr": 0.1}, steps=60))
    rates = [row[4] for row in record["curve"]]
    expected = [
        0.05 * (1 + math.cos(math.pi * min(step - 1, 29) / 30)) for step in range(10, 70, 10)
    ]
    assert rates == pytest.approx(expected, rel=1e-4)


def test_rules_look_at_the_ends_of_epochs_unless_they_are_long(study):
    controls = study("controls")
    assert controls.DEFAULT.fitted(180).check == 180
    assert controls.DEFAULT.fitted(2442) == controls.DEFAULT


def test_warm_up_multiplies_every_schedule(study):
    run = partial(made, study)
    small = job(study, "constant", task="transformer", steps=20, interval=10)
    record = run(small)
    lr = small.setting["lr"]
    assert [row[4] for row in record["curve"]] == pytest.approx([0.1 * lr, 0.2 * lr], rel=1e-4)


def test_a_diverged_run_counts_as_guessing(study):
    record = made(study, job(study, setting={"lr": 1e30}))
    assert record["diverged"]
    assert [row[:2] for row in record["curve"]][-1] == [60, 0.1]
    assert len(record["curve"]) == 6
    json.loads(json.dumps(record, allow_nan=False))


def test_the_cooldown_starts_when_the_forecast_stops_growing(study):
    peak = study("controls").Peak(patience=2)
    assert [peak.add(x) for x in (1.0, 2.0, 1.5, 3.0, 2.0, 2.5)] == [False] * 5 + [True]
    controls = study("controls")
    _, optimizer = parameter_and_sgd()
    control = controls.ForecastCooldown(optimizer, 0.5, controls.DEFAULT)
    control._start = 100
    assert [control.factor(step) for step in (0, 99, 100, 149, 500)] == pytest.approx(
        [1, 1, 1 - 1 / 50, controls.FLOOR, controls.FLOOR]
    )


# Shared beginnings ---------------------------------------------------------------------------


class After:
    """A rule that acts after a number of steps."""

    def __init__(self, steps):
        self.steps = steps

    def judge(self, reading):
        return Verdict(reading.step >= self.steps, "late enough")


@pytest.fixture
def eager(study, monkeypatch):
    """Rules that act within a run of a few steps, most of them more than once."""
    arms, sasa, controls = study("arms"), study("sasa"), study("controls")
    gain = partial(eq.rules.Gain, ahead=1e-9, confidence=0.501)
    for name, rule in {
        "paper-0.1": lambda _: eq.rules.Threshold(1e9),
        "stationary": lambda _: eq.rules.Stationary(1e-3, 1e-3, 1e3, 2.0),
        "gain": lambda _: gain(),
        "gain-known": lambda c: eq.rules.Gain(total_steps=c.budget, confidence=0.501),
    }.items():
        arm = replace(arms.ARMS[name], make=arms._ruled(rule, 0.7))
        monkeypatch.setitem(arms.ARMS, name, arm)

    def cooldown(context):
        budget, cadence = context.budget, context.cadence
        return controls.RuledCooldown(context.optimizer, After(35), budget, cadence)

    arm = replace(arms.ARMS["gain-start"], make=cooldown)
    monkeypatch.setitem(arms.ARMS, "gain-start", arm)
    monkeypatch.setattr(sasa, "LEAST", 2)
    monkeypatch.setattr(sasa, "SIGNIFICANCE", 1e-6)
    monkeypatch.setattr(controls.ForecastCooldown.__init__, "__defaults__", (1,))


@pytest.mark.parametrize(
    ("task", "busy"),
    [
        ("mlp", 5),
        pytest.param("resnet", 5, marks=pytest.mark.slow),
        pytest.param("transformer", 2, marks=pytest.mark.slow),
    ],
)
def test_runs_that_begin_together_equal_those_made_alone(study, eager, task, busy, tmp_path):
    """Every arm, continued from a fork or not, has the record of a run of its own."""
    arms, runs, controls = study("arms"), study("runs"), study("controls")
    cadence = controls.Cadence(check=5, every=2, horizons=(8, 12))
    names = [name for name, arm in arms.ARMS.items() if not arm.alone]
    lr = study("tasks").TASKS[task].rates[1]
    jobs = []
    for name in names:
        setting = arms.ARMS[name].trials(study("tasks").TASKS[task])[0] | {"lr": lr}
        if name == "plateau":
            setting["patience"] = 0
        steps = 60 * round(arms.ARMS[name].length)
        jobs.append(
            job(study, name, task, setting=setting, steps=steps, budget=60, cadence=cadence)
        )
    here = place(study, tmp_path)
    runs.execute_shared(jobs, here)
    forked = here.forked()
    lowered = {}
    for small in jobs:
        if small.name in forked:
            runs.execute(small, here)
        found = json.loads((tmp_path / f"{small.name}.json").read_text())
        alone = json.loads(json.dumps(made(study, small)))
        assert found["curve"] == alone["curve"], small.arm
        assert found["acted"] == alone["acted"], small.arm
        assert found["shared"] == forked.get(small.name, small.steps)
        lowered[small.arm] = len(found["acted"])
    assert not here.forked()
    assert forked[f"final_{task}_wsd_0"] == 49  # at step 48 the decay begins, at a factor of 1
    assert forked[f"final_{task}_gain-start_0"] == 36
    assert lowered["constant"] == 0
    assert sum(count > 1 for count in lowered.values()) == busy


def test_a_cooldown_of_a_rule_is_that_of_the_scheduler(study):
    """`FDRScheduler(cooldown_end=…)`, called at every step."""
    controls, budget = study("controls"), 60
    theta, optimizer = parameter_and_sgd()
    control = controls.RuledCooldown(optimizer, After(20), budget, controls.Cadence(5, 1))
    twin, other = parameter_and_sgd()
    scheduler = eq.FDRScheduler(other, rule=After(20), cooldown_end=budget, min_steps=1, every=1)
    for step in range(budget):
        assert optimizer.param_groups[0]["lr"] == 1.0
        assert control.factor(step) == pytest.approx(other.param_groups[0]["lr"])
        for p, made in ((theta, optimizer), (twin, other)):
            p.grad = torch.randn(3)
            made.step()
        if step % 5 == 4:
            control.check(step + 1, 0.0)
        scheduler.step()
    assert control.factor(budget) == 0


def test_averaged_parameters_are_evaluated_and_not_trained_with(study):
    for task in ("mlp", "resnet"):
        plain = made(study, job(study, "constant", task))
        averaged = made(study, job(study, "averaged", task))
        for one, two in zip(plain["curve"], averaged["curve"], strict=True):
            assert one[3:] == two[3:]  # training loss and learning rate
            assert one[2] != two[2]


# SASA+ ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_statistic_of_sasa_is_that_of_its_authors(study, momentum):
    """⟨x_{k+1}, d_k⟩ + (α/2)|d_k|² with damped momentum, up to the factor 1 − μ."""
    sasa = study("sasa")
    torch.manual_seed(0)
    theta = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    lr, decay = 0.1, 0.01
    optimizer = torch.optim.SGD([theta], lr=lr, momentum=momentum, weight_decay=decay)
    recorder = sasa.Recorder(optimizer, 80)
    x, direction, expected = theta.detach().clone(), torch.zeros(5, dtype=torch.float64), []
    for _ in range(80):
        gradient = torch.randn(5, dtype=torch.float64) + x
        theta.grad = gradient.clone()
        optimizer.step()
        direction = momentum * direction + (1 - momentum) * (gradient + decay * x)
        step = lr / (1 - momentum)
        x = x - step * direction
        value = x @ direction + step / 2 * direction @ direction
        expected.append(value.item() / (1 - momentum))
    assert torch.allclose(x, theta)
    samples = recorder.samples()
    assert len(samples) == 10  # the newest eighth
    assert samples == pytest.approx(expected[-10:], abs=1e-9)
    recorder.reset()
    assert len(recorder.samples()) == 0


def test_sasa_tests_both_halves_before_the_first_drop(study):
    is_stationary = study("sasa").is_stationary
    noise = np.random.default_rng(0).normal(size=400)
    noise -= noise.mean()
    width = noise.std(ddof=1) * 1.966 / 20
    halves = np.repeat([1.0, -1.0], 200)
    flat = noise - np.repeat([noise[:200].mean(), noise[200:].mean()], 200)
    width = flat.std(ddof=1) * 1.966 / 20
    assert is_stationary(flat + 0.5 * width, first=True)
    assert not is_stationary(flat + 1.2 * width, first=True)
    uneven = flat + 0.8 * width + 0.4 * width * halves  # 1.2 and 0.4 widths
    assert not is_stationary(uneven, first=True)
    assert is_stationary(uneven, first=False)
    assert not is_stationary(flat + 0.5 * width * halves, first=False)  # opposite signs


def test_sasa_drops_the_rate_and_stops_the_momentum(study):
    controls = study("controls")
    torch.manual_seed(0)
    theta = torch.nn.Parameter(torch.zeros(20))
    optimizer = torch.optim.SGD([theta], lr=0.5, momentum=0.5)
    control = controls.Sasa(optimizer, 0.1, 4000)
    for step in range(1, 4001):
        theta.grad = theta.detach() + torch.randn(20)
        optimizer.step()
        if step % 100 == 0:
            control.check(step, torch.zeros(()))
        if control.acted:
            break
    assert control.acted[0][0] > 800
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.state[theta]["momentum_buffer"].any()  # until the next step
    control.factor(step)
    assert not optimizer.state[theta]["momentum_buffer"].any()


# Statistics ----------------------------------------------------------------------------------


def test_means_and_paired_differences_by_hand(study):
    statistics = study("statistics")
    found = statistics.mean([1.0, 2.0, 3.0])
    assert found.value == 2
    assert found.margin == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)  # t of 2 degrees
    ours, theirs = {0: 5.0, 1: 6.0, 2: 8.0, 9: 0.0}, {0: 4.0, 1: 4.0, 2: 5.0}
    better = statistics.paired(ours, theirs, lower_is_better=False)
    assert better.estimate.value == 2
    assert better.estimate.margin == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert better.verdict == "undecided"
    close = {0: 4.9, 1: 5.0, 2: 6.1}
    assert statistics.paired(close, theirs, lower_is_better=False).verdict == "better"
    assert statistics.paired(close, theirs, lower_is_better=True).verdict == "worse"
    assert statistics.paired({0: 1.0, 1: 2.0}, theirs, lower_is_better=True) is None


def test_p_values_and_discoveries_by_hand(study):
    statistics = study("statistics")
    estimate = statistics.mean([1.0, 2.0, 3.0])  # t = 2√3 with two degrees of freedom
    t = 2 * math.sqrt(3)
    assert statistics.p_value(estimate) == pytest.approx(1 - t / math.sqrt(2 + t**2), abs=1e-6)
    assert statistics.p_value(statistics.mean([2.0, 2.0, 2.0])) == pytest.approx(0, abs=1e-9)
    # Five tests at 5 %: the bounds are 1, 2, 3, 4 and 5 %.
    assert statistics.discoveries([0.001, 0.5, 0.029, 0.025, 0.2]) == {0, 2, 3}
    assert statistics.discoveries([0.02, 0.5, 0.6]) == set()


def test_area_and_goal_by_hand(study):
    statistics = study("statistics")
    steps, metrics = (10, 20, 40, 80), (0.0, 1.0, 2.0, 9.0)
    assert statistics.area(steps, metrics, 40) == pytest.approx((5 + 30) / 30)
    assert math.isnan(statistics.area(steps, metrics, 10))
    reaching = partial(statistics.first_reaching, steps, metrics)
    assert reaching(1.5, lower_is_better=False) == 40
    assert reaching(10.0, lower_is_better=False) is None
    assert reaching(0.5, lower_is_better=True) == 10
    assert statistics.goal(0.9, lower_is_better=False) == pytest.approx(0.891)
    assert statistics.goal(0.99, lower_is_better=True) == pytest.approx(1.0)


def test_moments_by_hand(study):
    statistics = study("statistics")
    runs = [synthetic(study, "gain", seed, acted=acted) for seed, acted in enumerate(
        ([15, 30], [45, 50], [])
    )]  # fmt: skip
    found = statistics.moments(runs)
    assert found.count == pytest.approx(4 / 3)
    assert found.first == pytest.approx(1.0)
    assert found.first_spread == pytest.approx(math.sqrt(0.5))
    assert found.spread == pytest.approx(math.sqrt((0.5 + (20 / 30) ** 2 / 2) / 2))
    assert found.silent == 1


def synthetic(study, arm, seed, *, task="mlp", stage="final", trial=0, level=0.9, acted=()):
    """A record of a budget of 30 steps, with a metric that approaches a level."""
    curve = [
        [step, level - 0.3 / step + 0.001 * seed, 0.1, 0.1, 0.05] for step in range(10, 70, 10)
    ]
    raw = {
        "stage": stage, "task": task, "arm": arm, "seed": seed, "trial": trial,
        "setting": {"lr": 0.01 * (1 + trial)}, "budget": 30, "steps": 60, "interval": 10,
        "curve": curve, "acted": [[step, "why"] for step in acted], "diverged": False,
        "shared": 0, "seconds": 2.0, "data": "x",
        "where": {"torch": "2", "gpu": None, "commit": "abc"},
    }  # fmt: skip
    return study("records").parse(raw)


# The study -----------------------------------------------------------------------------------


def small_study(study, arms=("constant", "cosine", "plateau")):
    controls, module = study("controls"), study("study")
    cadence = controls.Cadence(check=5, every=1, horizons=(4, 6))
    return module.Study({"mlp": 30}, arms, (0, 1), (7,), cadence)


def test_settings_are_chosen_by_the_trials_and_arms_are_balanced(study):
    module = small_study(study)
    trials = [
        synthetic(study, arm, 7, stage="tuning", trial=trial, level=0.9 - 0.01 * (trial - 2) ** 2)
        for arm in module.arms
        for trial in range(8)
    ]
    chosen = module.chosen(trials)
    assert chosen == {("mlp", arm): {"lr": 0.03} for arm in module.arms}
    assert not module.final({k: v for k, v in chosen.items() if k[1] != "plateau"})
    assert module.chosen(trials[:7]) == {}  # of eight
    text = [replace(t, task="transformer") for t in trials[:8]]
    assert module.chosen(text) == {("transformer", "constant"): {"lr": 0.08}}  # lowest loss
    seeds = [job.seed for job in module.final(chosen)]
    assert seeds == [0, 0, 0, 1, 1, 1]
    assert [job.trial for job in module.tuning()] == sorted(job.trial for job in module.tuning())


def test_a_reported_run_is_made_again_if_another_setting_was_chosen_since(study, tmp_path):
    module, runs, results = small_study(study, ("constant",)), study("runs"), study("results")
    settings = study("arms").ARMS["constant"].trials(study("tasks").TASKS["mlp"])
    here = place(study, tmp_path)
    study("study").save(module, tmp_path)
    for trial in range(8):
        level = 0.9 - 0.01 * (trial - 2) ** 2
        record = synthetic(study, "constant", 7, stage="tuning", trial=trial, level=level)
        raw = record.raw | {"setting": settings[trial]}
        runs.write(tmp_path / f"{record.name}.json", raw)
    for seed, trial in ((0, 2), (1, 4)):  # the second with what was chosen before
        record = synthetic(study, "constant", seed)
        raw = record.raw | {"setting": settings[trial]}
        runs.write(tmp_path / f"{record.name}.json", raw)
    (left,) = module.remaining(here)
    assert [(job.stage, job.seed, job.setting) for job in left] == [("final", 1, settings[2])]
    assert [record.seed for record in results.Results(tmp_path).final] == [0]


def test_reported_seeds_are_not_tuned_on(study):
    module = study("study")
    with pytest.raises(ValueError, match="overlap"):
        module.Study(seeds=(0, 1), tuning_seeds=(1,))
    with pytest.raises(ValueError, match="multiples of 30"):
        module.Study({"mlp": 100})


def test_a_killed_process_loses_its_own_run_only_and_is_made_again(study, tmp_path):
    """In real processes: two runs with a process between them that is killed."""
    workers, runs, module = study("workers"), study("runs"), small_study(study)
    here = place(study, tmp_path)
    jobs = module.tuning()[:2]

    def work(job):
        return workers.Work(job.name, runs.execute, (job, here))

    killed = workers.Work("killed", signal.raise_signal, (signal.SIGKILL,))
    wrong = workers.Work("wrong", int, ("not a number",))
    listed = [work(jobs[0]), killed, wrong, work(jobs[1])]
    late = workers.Work("late", runs.execute, (jobs[0], here), 1e6)
    ticks = []
    outcome = workers.work_off(lambda: [*listed, late], 2, 60, lambda: ticks.append(1))
    assert set(outcome.finished) == {job.name for job in jobs}
    assert set(outcome.failed) == {"killed", "wrong"}
    assert ticks
    written = {job.name: (tmp_path / f"{job.name}.json").read_text() for job in jobs}
    left = [job for jobs in module.remaining(here) for job in jobs]
    assert len(left) == len(module.tuning()) - 2
    assert not {job.name for job in left} & set(written)
    again = made(study, jobs[1])
    assert json.loads(written[jobs[1].name])["curve"] == json.loads(json.dumps(again["curve"]))


def test_a_study_resumes_until_nothing_is_left(load, study, tmp_path, monkeypatch, capsys):
    """The command, with runs in this process."""
    training, workers = load("training"), study("workers")
    made = []

    def here(remaining, count, seconds, tick, limit=9):
        finished = []
        while (left := remaining()) and len(finished) < limit:
            left[0].function(*left[0].arguments)
            finished.append(left[0].name)
        made.extend(finished)
        tick()
        return workers.Outcome(tuple(finished), (), 0.0)

    monkeypatch.setattr(workers, "work_off", here)
    tar = tmp_path / "records.tar"
    out = tmp_path / "out"
    command = f"--tiny --out {out} --pack {tar}".split()
    first = ["--tasks", "mlp", "--budget", "mlp=30", "--arms", "constant", "cosine", "--seeds", "2"]
    training.main(command + first)
    assert "9 runs done" in capsys.readouterr().out
    training.main(command)
    training.main(command)
    assert "0 left" in capsys.readouterr().out
    assert len(made) == len(set(made)) == 2 * 8 + 2 * 2
    assert tar.stat().st_size > 1000
    for wrong in (["--seeds", "3"], ["--arms", "cosine", "step"]):
        with pytest.raises(SystemExit):
            training.main([*command, *wrong])
        assert f"other {wrong[0][2:]}" in capsys.readouterr().err
    training.main([*command, "--arms", "constant", "cosine", "step"])
    assert " 0 left" not in capsys.readouterr().out  # an arm was added
    training.main(command)
    training.main(command)
    assert "0 left" in capsys.readouterr().out
    before = [record.name for record in study("records").read(out)]
    training.main(["--out", str(out), "--collect"])
    assert sorted(path.name for path in out.iterdir()) == ["mlp.jsonl", "study.json"]
    assert [record.name for record in study("records").read(out)] == before
    training.main(command)
    assert "0 runs done" in capsys.readouterr().out


def test_tiny_runs_cannot_overwrite_measured_results(load, capsys):
    with pytest.raises(SystemExit):
        load("training").main(["--tiny"])
    assert "cannot overwrite measured results" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        load("training").main([])
    assert "--data is missing" in capsys.readouterr().err


def test_budgets_fit_into_a_time(study):
    plan, module = study("plan"), study("study")
    speeds = plan.assumed()
    fitted = plan.fit(module.Study(), speeds, 16, 60 * 24)
    took = plan.estimate(fitted.total(), speeds, 16) / 60
    assert 23.5 < took <= 24
    assert "all" in plan.report(fitted, speeds, 16)
    with pytest.raises(ValueError, match="starting and evaluating runs alone"):
        plan.fit(module.Study(), speeds, 1, 60)
    record = synthetic(study, "gain", 0)
    slower = plan.observed(speeds, [record])
    job = study("plan")._job(record)
    assert slower["mlp"].run(job) == pytest.approx(record.seconds)


# Tables --------------------------------------------------------------------------------------


def test_tables_and_page_from_records_alone(load, study, tmp_path):
    tables, figures, runs = study("tables"), study("figures"), study("runs")
    out = tmp_path / "out"
    levels = {"constant": 0.85, "cosine": 0.9, "gain": 0.92, "cosine-double": 0.91}
    for arm, level in levels.items():
        for seed in range(3):
            noise = 0.0005 * ((seed * 7 + len(arm)) % 3)
            record = synthetic(study, arm, seed, level=level + noise, acted=(15 + seed,))
            runs.write(out / f"{record.name}.json", record.raw)
    for trial in range(3):
        record = synthetic(study, "constant", 7, stage="tuning", trial=trial)
        runs.write(out / f"{record.name}.json", record.raw)
    ratio = {"median": 1.0, "ratio": 1.5, "ratio_interval": [1.4, 1.6]}
    runs.write(
        out / "overhead.json", {"mlp": {"bare": ratio | {"ratio": 1.0}, "forecaster": ratio}}
    )
    results = study("results").Results(out)
    head, rows = tables.known(results, "mlp")
    by_title = {row[0]: row for row in rows}
    assert list(by_title) == ["constant", "cosine", "`Gain`"]
    words = [row[3].rsplit(", ", 1)[-1] for row in rows]
    assert words == ["worse", "–", "better"]
    gain = dict(zip(head, by_title["`Gain`"], strict=True))
    assert gain["steps to 99 % of the best"] == "20"
    assert by_title["constant"][5] == "never (0 of 3 runs)"
    assert by_title["constant"][1] == "lr 0.01 (end of the grid)"
    values = [run.metrics[1] for run in results.runs("mlp", "gain")]  # after 30/1.5 steps
    assert tables.costs(results, "mlp")[1][-1] == [
        "`Gain`", "1.500 (1.400 to 1.600)", f"{100 * np.mean(values):.2f}"
    ]  # fmt: skip
    head, rows = tables.unknown(results, "mlp")
    row = dict(zip(head, rows[2], strict=True))
    assert row["arm"] == "`Gain`"
    assert row["half the budget"] == "–"  # not evaluated at step 15
    assert row["gain over cosine for this one"].endswith("better")
    rows = tables.acting(results, "mlp")[1]
    assert rows[0] == ["`Gain`", "1.0", "0.533", "0.033", "0.033", "0 of 3"]
    verdicts = tables.verdicts(results)[1]
    assert verdicts == [
        ["constant", "no", "– / **worse** / **worse**"],
        ["`Gain`", "no", "– / **better** / **better**"],
    ]
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    assert figures.write_page(out, page)
    text = page.read_text()
    assert "### MLP, MNIST, SGD" in text
    assert "| `Gain` | no | – / **better** / **better** |" in text
    assert (page.parent / "figures" / "training-mlp.png").stat().st_size > 10_000
    assert (page.parent / "figures" / "training-differences.png").stat().st_size > 10_000
    assert figures.write_page(out, page)  # again: nothing is doubled
    assert page.read_text() == text
    assert not figures.write_page(tmp_path / "empty", page)


def test_published_tables_fit_the_records(load, study):
    """The page, if it is published, is what the records say."""
    training, tables = load("training"), study("tables")
    found = tables.tables(training.OUT)
    assert bool(found) == training.PAGE.exists()
    for name, table in found.items():
        words = table if isinstance(table, str) else load("tables").markdown(*table)
        assert words in training.PAGE.read_text(), name


def test_the_time_of_a_step_is_measured_for_each_cost(study, tmp_path):
    controls = study("controls")
    cadence = controls.Cadence(check=2, every=1, horizons=(4, 6))
    arms = ["constant", "cosine", "paper-0.1", "gain"]
    study("overhead").measure(["mlp"], arms, None, tmp_path, cadence=cadence, rounds=2, tiny=True)
    found = json.loads((tmp_path / "overhead.json").read_text())["mlp"]
    assert list(found) == ["bare", "bare again", "monitor", "forecaster"]
    assert found["bare"]["ratio"] == 1
