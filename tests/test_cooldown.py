"""A cooldown begins when it pays, falls linearly to the end, and says what does not fit."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import equilibrate as eq
from equilibrate.estimates import Estimate
from equilibrate.forecast.outcome import Outcomes
from equilibrate.forecast.progress import Progress
from equilibrate.schedulers.cooldown import judge


class Run:
    """A noisy quadratic in 40 dimensions, at its noise floor if `distance` is 0."""

    def __init__(self, total_steps=2000, lrs=(0.1,), distance=0.0, drift=0.0, seed=0, **options):
        self.random = torch.Generator().manual_seed(seed)
        start = torch.full((40,), float(distance), dtype=torch.float64)
        self.params = [nn.Parameter(start.clone()) for _ in lrs]
        groups = [{"params": [p], "lr": lr} for p, lr in zip(self.params, lrs, strict=True)]
        self.optimizer = torch.optim.SGD(groups)
        self.scheduler = eq.Cooldown(self.optimizer, total_steps, **options)
        self.drift = drift
        self.rates, self.losses = [], []

    def train(self, steps, *, handed=lambda loss: loss):
        for _ in range(steps):
            t, total = self.scheduler.last_epoch, 0.0
            for p in self.params:
                noise = torch.randn(40, generator=self.random, dtype=torch.float64)
                p.grad = p.detach() + noise
                total = total + 0.5 * p.detach().square().sum() + noise @ p.detach()
            self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.optimizer.step()
            self.losses.append(float(total) - self.drift * t)
            self.scheduler.step(handed(total - self.drift * t))
        return self

    def state(self):
        return copy.deepcopy(
            {
                "params": [p.detach() for p in self.params],
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "random": self.random.get_state(),
            }
        )

    def load(self, state):
        with torch.no_grad():
            for p, value in zip(self.params, state["params"], strict=True):
                p.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.random.set_state(state["random"])
        return self


@pytest.mark.parametrize("handed", [lambda loss: loss, float])
def test_it_begins_at_the_noise_floor_and_falls_linearly_to_the_end(handed):
    run = Run().train(2000, handed=handed)
    assert isinstance(run.scheduler, LRScheduler)
    decision = run.scheduler.last_decision
    assert decision.lowered
    assert decision.reason.startswith("decaying over the last ")
    assert decision.reason.endswith("; the learning rate decays linearly until step 2000")
    start = decision.step
    assert 300 <= start <= 1800
    expected = [0.1] * start + [0.1 * (2000 - t) / (2000 - start) for t in range(start, 2000)]
    assert np.array(run.rates)[:, 0] == pytest.approx(np.array(expected), rel=1e-12)
    assert run.optimizer.param_groups[0]["lr"] == 0
    assert run.scheduler.is_decaying
    assert [made.lowered for made in run.scheduler.decisions].count(True) == 1
    noise_floor = 40 * 0.1 / (4 - 2 * 0.1)
    assert 0.5 * run.params[0].square().sum() < 0.2 * noise_floor


def test_it_waits_while_the_loss_falls_and_begins_in_the_last_tenth():
    run = Run(drift=0.01).train(2000)
    decision = run.scheduler.last_decision
    assert decision.step == 1800
    assert decision.reason.startswith("10% of the steps are left; decaying over the last 200 steps")
    waited = list(run.scheduler.decisions)[-2]
    assert not waited.lowered
    assert waited.reason.startswith("not yet: decaying over the last ")


def test_warm_up_is_linear_and_counts():
    run = Run(500, lrs=(0.1, 0.02), warmup_steps=10).train(500)
    assert np.array(run.rates[:11])[:, 0] == pytest.approx(
        [0.01 * min(t + 1, 10) for t in range(11)]
    )
    assert run.rates[5][1] == pytest.approx(0.2 * run.rates[5][0])
    assert run.scheduler.last_decision.lowered
    assert run.rates[-1] == pytest.approx(
        [lr / (500 - run.scheduler.last_decision.step) for lr in (0.1, 0.02)]
    )


def test_min_lr_is_the_end_of_the_line_and_never_raises_a_rate():
    with pytest.warns(UserWarning, match=r"min_lr=0.05 is above the learning rate 0.02 .* group 1"):
        run = Run(400, lrs=(0.1, 0.02), min_lr=[0.01, 0.05])
    run.train(400)
    assert [float(g["lr"]) for g in run.optimizer.param_groups] == pytest.approx([0.01, 0.02])
    assert run.rates[-1][0] > 0.01


@pytest.mark.parametrize("steps", [2, 9, 40])
def test_short_trainings_decay_in_their_last_steps(steps):
    run = Run(steps).train(steps)
    assert run.scheduler.last_decision.step == steps - max(1, steps // 5)
    assert run.optimizer.param_groups[0]["lr"] == 0


def test_while_it_decays_nothing_is_measured_and_averages_are_the_own_weights():
    run = Run().train(1500)
    before = run.scheduler.forecaster.step
    run.train(100)
    assert run.scheduler.forecaster.step == before
    assert run.scheduler.state_dict()["forecaster"] is None
    assert run.scheduler.forecaster.forecast().undefined == "nothing is measured any more"
    own = run.params[0].detach().clone()
    with run.scheduler.forecaster.averaged():
        assert torch.equal(run.params[0].detach(), own)


def test_a_copy_of_a_decaying_scheduler_measures_nothing_either():
    copied = copy.deepcopy(Run().train(1900).scheduler)
    assert not copied.forecaster.is_attached


@pytest.mark.parametrize("stopped", [60, 611, 1500])
def test_a_run_stopped_and_resumed_equals_one_that_was_not(tmp_path, stopped):
    whole = Run(warmup_steps=100).train(2000)
    torch.save(Run(warmup_steps=100).train(stopped).state(), tmp_path / "state.pt")
    resumed = Run(warmup_steps=100).load(torch.load(tmp_path / "state.pt")).train(2000 - stopped)
    assert resumed.rates == whole.rates[stopped:]
    assert resumed.losses == whole.losses[stopped:]
    assert resumed.scheduler.last_decision == whole.scheduler.last_decision


@pytest.mark.parametrize("stopped", [300, 1900])
def test_the_length_given_now_wins_over_the_saved_one(stopped):
    state = Run(2000).train(stopped).state()
    with pytest.warns(UserWarning, match=r"saved with total_steps=2000; total_steps=3000 of this"):
        longer = Run(3000).load(state)
    assert "until step 2000" not in longer.scheduler.last_decision.reason
    rate = float(longer.optimizer.param_groups[0]["lr"])
    longer.train(3000 - stopped)
    assert longer.rates[0] == [pytest.approx(rate)]
    assert max(map(max, longer.rates)) <= rate * (1 + 1e-12)
    assert longer.rates[-1][0] > 0
    assert longer.optimizer.param_groups[0]["lr"] == 0


def test_a_length_that_is_over_is_refused_and_a_decay_that_has_ended_is_told_of():
    state = Run(600).train(500).state()["scheduler"]
    for total_steps in (300, 480, 500):
        run = Run(total_steps)
        with pytest.raises(
            ValueError, match=rf"after 500 steps, .* total_steps={total_steps}: pass"
        ):
            run.scheduler.load_state_dict(state)
        assert run.scheduler.last_epoch == 0
    state = Run(600).train(600).state()
    with pytest.warns(UserWarning, match=r"continues from lr=0, where nothing is learned: to"):
        Run(1000).load(state)


def test_a_first_step_with_a_rate_of_zero_counts():
    """A warm-up from zero, as Hugging Face's constant_with_warmup."""
    run = Run(300, min_lr=0.01)
    warm_up = LambdaLR(run.optimizer, lambda step: min(1.0, step / 20))
    for _ in range(300):
        run.train(1)
        if not run.scheduler.is_decaying:
            warm_up.step()
    rates = np.array(run.rates)[:, 0]
    assert rates[:21] == pytest.approx(0.1 * np.arange(21) / 20)
    start = run.scheduler.last_decision.step
    assert rates[start:] == pytest.approx(np.linspace(0.1, 0.01, 301 - start)[:-1])
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert run.scheduler.last_epoch == 300


def test_a_decay_that_is_rolled_back_measures_again():
    run, early = Run().train(2000), Run().train(300).state()
    run.load(early)
    assert not run.scheduler.is_decaying
    run.train(100)
    assert run.scheduler.forecaster.step == 400


def test_a_min_lr_of_numpy_is_saved(tmp_path):
    run = Run(min_lr=np.float32(0.01)).train(10)
    torch.save(run.scheduler.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt")["min_lr"] == pytest.approx(0.01)


def test_a_group_added_later_keeps_its_rate_and_tensor_rates_are_changed_in_place():
    lr = torch.tensor(0.1, dtype=torch.float64)
    run = Run(200, lrs=(lr,)).train(195)
    assert run.optimizer.param_groups[0]["lr"] is lr
    assert 0 < float(lr) < 0.1
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.3})
    run.optimizer.step()
    run.scheduler.step(1.0)
    assert run.optimizer.param_groups[1]["lr"] == 0.3


def test_a_group_added_before_the_decay_decays_too():
    run = Run(100).train(50)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.3})
    run.params.append(nn.Parameter(torch.zeros(40, dtype=torch.float64)))
    run.train(50)
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.0, 0.0]


def test_a_loss_that_is_not_finite_keeps_nothing_waiting():
    whole = Run().train(2000).scheduler.last_decision
    run = Run().train(300).train(3, handed=lambda loss: loss * math.nan).train(1697)
    assert run.scheduler.last_decision.lowered
    assert abs(run.scheduler.last_decision.step - whole.step) <= 100


def test_parameters_that_were_not_finite_and_are_restored_keep_it_waiting_for_200_steps():
    run = Run().train(300)
    good = run.state()["params"]
    with torch.no_grad():
        run.params[0].fill_(math.nan)
    run.train(20)
    with torch.no_grad():
        run.params[0].copy_(good[0])
    run.train(180)
    assert "not finite, so the averages begin again" in run.scheduler.decisions[-2].reason
    run.train(200)
    assert "would end at" in run.scheduler.decisions[-1].reason


def test_a_run_without_losses_is_told_once_and_still_decays():
    run = Run(600)
    with pytest.warns(
        UserWarning, match=r"no loss was handed over, .* scheduler.step\(loss\)"
    ) as told:
        run.train(600, handed=lambda loss: None)
    assert len(told) == 1
    assert run.scheduler.last_decision.step == 480


def test_steps_that_no_hook_saw_are_warned_of():
    run = Run(600)
    run.scheduler.detach()
    with pytest.warns(UserWarning, match=r"no optimizer step was seen in many calls .* eq.measure"):
        run.train(150)


@pytest.mark.parametrize(("calls", "steps"), [(2, 1), (1, 2)])
def test_calls_that_do_not_match_the_steps_are_warned_of(calls, steps):
    run = Run(1000)

    def loop():
        for _ in range(200):
            for _ in range(steps):
                run.params[0].grad = torch.ones(40, dtype=torch.float64)
                run.optimizer.step()
            for _ in range(calls):
                run.scheduler.step(1.0)

    with pytest.warns(UserWarning, match=r"not called once after every optimizer step \(at first"):
        loop()


def test_a_training_that_continues_at_a_rate_of_zero_is_told_once():
    run = Run(50).train(50)
    with pytest.warns(UserWarning, match=r"continues after total_steps=50, .* rate is 0") as told:
        run.train(100)
    assert len(told) == 1
    Run(50, min_lr=1e-3).train(200)  # not at zero


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_steps": 0}, "total_steps must be a whole number of steps, at least 2, got 0"),
        ({"total_steps": 2.5}, "total_steps must be a whole number of steps, at least 2, got 2.5"),
        ({"total_steps": True}, "total_steps must be a whole number"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number of steps, at least 0, got -1"),
        ({"warmup_steps": 100}, r"warmup_steps is 100, but the training has total_steps=100"),
        ({"min_lr": -1.0}, "min_lr must be one number ≥ 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match=message):
        eq.Cooldown(optimizer, **{"total_steps": 100} | arguments)


def test_whole_numbers_may_be_floats():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = eq.Cooldown(optimizer, total_steps=1e4, warmup_steps=1e2)  # pyright: ignore[reportArgumentType]
    steps = scheduler.total_steps, scheduler.warmup_steps
    assert steps == (10_000, 100)
    assert all(type(number) is int for number in steps)
    for wrong in (math.inf, math.nan, "10"):
        with pytest.raises(ValueError, match=f"total_steps must be a whole .*, got {wrong!r}"):
            eq.Cooldown(optimizer, total_steps=wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("loss", ["1", True, torch.ones(2), torch.tensor(1), [1.0]])
def test_what_is_not_a_loss_is_named(loss):
    run = Run()
    with pytest.raises(
        TypeError, match="loss must be a number or a floating-point tensor with one"
    ):
        run.scheduler.step(loss)


def test_the_state_of_another_scheduler_is_refused():
    run = Run()
    with pytest.raises(ValueError, match="not the state of a Cooldown: it holds last_epoch"):
        run.scheduler.load_state_dict(eq.FDRScheduler(run.optimizer).state_dict())


def test_a_state_that_does_not_fit_changes_nothing():
    run = Run().train(20)
    before = run.state()["scheduler"]
    with pytest.raises(ValueError, match="state_dict belongs to another model"):
        run.scheduler.load_state_dict(Run(lrs=(0.1, 0.2)).train(500).scheduler.state_dict())
    after = run.state()["scheduler"]
    assert {k: after[k] for k in after if k != "forecaster"} == {
        k: before[k] for k in before if k != "forecaster"
    }
    assert run.train(100).scheduler.last_epoch == 120


def test_the_default_device_may_be_another_one_than_that_of_the_model():
    """With `torch.set_default_device("cuda")` numbers that stay on the host must not go there."""
    theta = nn.Parameter(torch.ones(40))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    with torch.device("meta"):  # nothing can be read from there
        scheduler = eq.Cooldown(optimizer, total_steps=600)
        for _ in range(600):
            theta.grad = theta.detach() + torch.randn_like(theta)
            optimizer.step()
            scheduler.step(theta.square().sum(), lambda: theta.square().sum())
            scheduler.load_state_dict(scheduler.state_dict())
    assert "would end at" in scheduler.last_decision.reason


def known(slope, noise=0.1, error=0.01, step=800, left=200):
    """Outcomes of a run whose loss falls by `slope` in each step."""
    fall = slope * step  # in units of the steps so far, at power −1, a straight line
    one = np.ones(1)
    means, covariances = np.array([[2.0, -fall]]), np.diag([1e-4, (0.1 * fall) ** 2])[None]
    nothing = np.zeros((1, 3))
    progress = Progress(step, one, -one, means, covariances, 0 * one, nothing, nothing, nothing)
    return Outcomes(left, progress, Estimate(noise, error))


@pytest.mark.parametrize(
    ("slope", "noise", "left", "act"),
    [
        (0.0, 0.1, 500, True),  # the noise floor
        (1e-2, 0.1, 500, False),  # the progress is worth more
        (-1e-2, 0.1, 500, False),  # a rise that is not certain begins nothing by itself
        (-1e-5, 0.1, 500, True),  # it is taken as no fall
        (0.0, -0.1, 500, False),
        (0.0, 0.015, 500, False),  # the gain is within its own error
        (1e-5, 0.1, 200, True),
        (1e-2, 0.1, 200, False),
        (1e-2, 0.1, 100, True),  # the last tenth
    ],
)
def test_the_decay_begins_where_the_forecast_end_is_best(slope, noise, left, act):
    decided, reason = judge(known(slope, noise, left=left), left, left / 1000)
    assert decided is act
    assert f"decaying over the last {left} steps would end at" in reason
    assert reason.startswith("not yet: ") is not act


def test_an_epoch_is_not_taken_for_a_loss():
    run = Run()
    with pytest.raises(TypeError, match=r"not an epoch, got 1: call scheduler.step\(loss\)"):
        run.scheduler.step(1)


def test_without_a_forecast_it_begins_in_the_last_fifth():
    assert judge("10 of 128 steps seen", 201, 0.201) == (False, "not yet: 10 of 128 steps seen")
    begun, reason = judge("10 of 128 steps seen", 200, 0.2)
    assert begun
    assert reason == "20% of the steps are left, and there is no forecast: 10 of 128 steps seen"


class Synthetic:
    """SGD on a loss with 16 modes and known minimum 0, whose handed-over loss is noisy.

    The loss is quadratic or, like a logistic one, linear far from the minimum. Curvatures, the
    distance from the minimum, the noise of gradients and losses and the learning rate are random.
    """

    def __init__(self, seed, steps):
        random = np.random.default_rng(seed)
        self.is_quadratic, self.steps = seed % 2 == 0, steps
        self.h = np.logspace(random.uniform(-3.5, -2), 0, 16)
        self.start = 2 * random.standard_normal(16) * self.h ** -random.uniform(0.1, 0.4)
        noise, self.spread = 10 ** random.uniform(-1, 0.5), 10 ** random.uniform(-1, 0.7)
        self.lr = random.uniform(0.05, 0.4)
        self.noise = noise * np.sqrt(self.h) * random.standard_normal((steps, 16))
        self.factors = 1 + self.spread * random.standard_normal(steps)

    def loss(self, theta):
        x = np.sqrt(self.h) * theta
        return ((x**2 / 2) if self.is_quadratic else np.logaddexp(x, -x) - np.log(2)).sum(-1)

    def gradient(self, theta):
        root = np.sqrt(self.h)
        return root * (root * theta if self.is_quadratic else np.tanh(root * theta))

    def fixed(self, shares):
        """Return the loss at the end for decays over the last shares of the steps."""
        theta = np.repeat(self.start[None], len(shares), axis=0)
        begin = np.array([self.steps - round(share * self.steps) for share in shares])
        for t in range(self.steps):
            left = np.minimum(1, (self.steps - 1 - t) / (self.steps - begin))
            theta = theta - self.lr * left[:, None] * (self.gradient(theta) + self.noise[t])
        return self.loss(theta)

    def scheduled(self):
        """Return the loss at the end with a `Cooldown`, and at which step the decay began."""
        p = nn.Parameter(torch.tensor(self.start))
        optimizer = torch.optim.SGD([p], lr=self.lr)
        scheduler = eq.Cooldown(optimizer, total_steps=self.steps)
        for t in range(self.steps):
            theta = p.detach().numpy()
            loss = self.loss(theta) * self.factors[t]
            p.grad = torch.from_numpy(self.gradient(theta) + self.noise[t])
            optimizer.step()
            scheduler.step(float(loss))
        begun = [decision.step for decision in scheduler.decisions if decision.lowered]
        return self.loss(p.detach().numpy()), begun[0]


@pytest.mark.slow
def test_it_ends_nearly_as_low_as_the_best_share_in_many_trainings():
    """200 trainings with loss noise of 0.1 to 5 times the loss, seeds that nothing was tuned on.

    A fixed tenth has a median of 1.00 and a ninth decile of 2.3, a fixed fifth 1.07 and 1.6.
    """
    shares = (0.5, 0.4, 0.3, 0.2, 0.1)
    ratios, early = [], 0
    for seed in range(1000, 1200):
        run = Synthetic(seed, steps=1500)
        fixed = run.fixed(shares)
        end, begun = run.scheduled()
        ratios.append(end / fixed.min())
        early += begun < 300 and fixed.argmin() > 0
    median, ninth = np.percentile(ratios, [50, 90])
    assert early <= 2
    assert median <= 1.1
    assert ninth <= 1.5
