"""What the callbacks of all trainers have in common, without a trainer."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn

import equilibrate as eq
from equilibrate.integrations._binding import (
    CooldownSettings,
    FDRSettings,
    MonitorSettings,
    Training,
)
from equilibrate.schedulers.decision import Decision


def training(start=0, end=400, model=None, **options):
    torch.manual_seed(0)
    model = model or nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(optimizer, model, start, end, **options)


def steps(made, number, *bindings, replay=None):
    for _ in range(number):
        for p in made.model.parameters():
            p.grad = 0.3 * p.detach() + torch.randn_like(p)
        made.optimizer.step()
        for binding in bindings:
            binding.add_loss(torch.rand(()), 1, replay)
            binding.end_step()


@pytest.fixture
def handed_over(monkeypatch):
    losses, step = [], eq.Cooldown.step

    def noting(self, loss=None, closure=None):
        losses.append(loss)
        step(self, loss, closure)

    monkeypatch.setattr(eq.Cooldown, "step", noting)
    return losses


def test_a_cooldown_gets_the_mean_over_micro_batches(handed_over):
    binding = CooldownSettings().attach(training())
    handed_over.clear()  # its first step is torch's own
    for losses in ([3.0], [1.0, 3.0], [], [1.0, 2.0, 6.0]):
        for loss in losses:
            divided_by = 3 if len(losses) == 3 else 1
            binding.add_loss(torch.tensor(loss / divided_by), divided_by)
        binding.end_step()
    found = [loss if loss is None else float(loss) for loss in handed_over]
    assert found == [3.0, 2.0, None, pytest.approx(3.0)]


def test_the_mean_is_as_precise_as_its_losses(handed_over):
    binding = CooldownSettings().attach(training())
    for i in range(1000):
        binding.add_loss(torch.tensor(1.0 + (i == 0), dtype=torch.bfloat16))
    binding.end_step()
    assert float(handed_over[-1]) == 1.001


def test_a_decision_is_reported_once():
    made = training()
    binding = CooldownSettings().attach(made)
    acted = []
    for _ in range(400):
        steps(made, 1)
        binding.add_loss(torch.tensor(1.0 - 0.001 * len(acted)))  # staying is worth much
        acted.append(binding.end_step())
    [decision] = filter(None, acted)
    assert decision.step == 1 + acted.index(decision) == 360
    assert made.optimizer.param_groups[0]["lr"] == 0
    words = binding.describe(decision, step=1360)
    assert words.startswith("equilibrate: at step 1,360 the learning rate begins to fall from 0.")
    assert words.endswith(decision.reason)
    lowering = FDRSettings().attach(training())
    words = lowering.describe(Decision(9, True, "why", (0.1, 0.1, 0.2)), step=9)
    assert words == "equilibrate: at step 9 the learning rate was lowered to 0.1, 0.2: why"


@pytest.mark.parametrize(
    "settings",
    [
        CooldownSettings(warmup_steps=20),
        FDRSettings(min_steps=10),
        MonitorSettings(layers=True, forecast=True),
    ],
    ids=lambda settings: type(settings).__name__,
)
def test_a_state_continues(settings):
    """The state is restored after that of the optimizer, unlike in a loop by hand."""
    made = training()
    binding = settings.attach(made)
    steps(made, 130, binding)
    other = training(model=deepcopy(made.model))
    other.optimizer.load_state_dict(deepcopy(made.optimizer.state_dict()))
    again = settings.attach(other)
    again.resume(deepcopy(binding.state_dict()))
    for one, its in ((made, binding), (other, again)):
        torch.manual_seed(1)
        steps(one, 200, its)
        its.end_epoch()
    assert binding.scalars() == again.scalars()
    assert all(map(torch.equal, made.model.parameters(), other.model.parameters()))
    if binding.scheduler is not None:
        assert binding.scheduler.last_decision == again.scheduler.last_decision


def test_steps_are_counted_from_where_the_callback_began():
    binding = CooldownSettings().attach(training(start=100, end=500))
    with pytest.warns(UserWarning, match=r"step 100 holds no state .* of the 400 steps left"):
        binding.resume(None)
    again = training(start=binding.state_dict()["start"], end=500)
    assert CooldownSettings().attach(again).scheduler.total_steps == 400


@pytest.mark.parametrize("end", [1, 2])
def test_trial_runs_are_short(end):
    """As with fast_dev_run, and a warm-up that does not fit."""
    assert CooldownSettings(warmup_steps=10).attach(training(end=end)).scheduler.total_steps == 2


def test_the_warm_up_of_the_trainer_is_taken_if_there_is_no_other():
    made = training(warmup_steps=20)
    assert CooldownSettings().attach(made).scheduler.warmup_steps == 20
    assert CooldownSettings(warmup_steps=5).attach(made).scheduler.warmup_steps == 5


def test_a_length_that_is_unknown_is_refused():
    with pytest.raises(
        ValueError, match=r"does not know how many .*: limit the training by max_ep"
    ):
        CooldownSettings().attach(training(end=math.inf))


@pytest.mark.parametrize("settings", [CooldownSettings, MonitorSettings])
def test_evaluations_with_averaged_parameters(settings):
    made = training()
    for wanted in (True, False):
        binding = settings(evaluate_averaged=wanted).attach(made)
        steps(made, 40)
        own = made.model.weight.detach().clone()
        with binding.averaged():
            assert torch.equal(made.model.weight, own) is not wanted
        assert torch.equal(made.model.weight, own)


def differences(binding):
    return [
        own - averaged for own, averaged in binding.forecaster.state_dict()["comparisons"]["values"]
    ]


def test_the_last_micro_batch_is_compared():
    """The difference is that of its losses, and the loss of the step is the mean of all."""
    made = training()
    binding = MonitorSettings(forecast=True).attach(made)
    for _ in range(50):
        steps(made, 1)
        binding.add_loss(torch.tensor(1.5), 2, lambda: pytest.fail("not the last one"))
        binding.add_loss(torch.tensor(0.6), 2, lambda: torch.tensor(1.1))
        binding.end_step()
    assert differences(binding) == [pytest.approx(0.1)]
    [first, *_] = binding.forecaster.state_dict()["losses"]["rows"]
    assert float(first[0] / first[1]) == pytest.approx(2.1)


def test_a_comparison_is_made_every_50_steps_only():
    made, calls = training(), []
    binding = MonitorSettings(forecast=True).attach(made)
    steps(made, 160, binding, replay=lambda: calls.append(binding.forecaster.step) or 1.0)
    assert calls == [50, 100, 150]


@pytest.mark.parametrize("failure", [KeyError("labels"), None], ids=["raises", "no loss"])
def test_a_training_step_that_cannot_be_evaluated_again_is_reported_once(failure):
    made, calls = training(), []

    def replay():
        made.model.count = 1
        calls.append(failure)
        if failure is not None:
            raise failure

    binding = MonitorSettings(forecast=True).attach(made)
    with pytest.warns(UserWarning, match=r"a second time \((KeyError|TypeError)") as caught:
        steps(made, 240, binding, replay=replay)
    assert len(caught) == len(calls) == 1
    assert all(map(math.isnan, differences(binding)))
    assert len(differences(binding)) == 4  # as many as on other processes
    assert not hasattr(made.model, "count")
    assert binding.forecaster.forecast(48).undefined is None  # from gradients


def test_statistics_that_do_not_fit_are_reported():
    made = training(model=nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    with pytest.warns(UserWarning, match="statistics of BatchNorm do not fit averaged"):
        MonitorSettings(evaluate_averaged=True).attach(made)


def test_a_monitor_alone():
    made = training()
    binding = MonitorSettings(layers=True).attach(made)
    steps(made, 20)
    assert binding.end_step() is binding.end_epoch() is None
    assert binding.scheduler is binding.forecaster is None
    assert "equilibrate_layers/weight/residual" in binding.scalars()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (CooldownSettings(warmup_steps=-1), "warmup_steps must be"),
        (FDRSettings(factor=2), "factor must lie between 0 and 1"),
    ],
)
def test_settings_are_checked_when_a_training_begins(settings, words):
    with pytest.raises(ValueError, match=words):
        settings.attach(training())
